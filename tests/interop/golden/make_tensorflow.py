"""Makes the golden files in tensorflow/: small checkpoints written by TensorFlow itself, and the losses that the
authors' own model code gives with them.

    python make_tensorflow.py FOLDER

FOLDER holds tf/model.py of the authors' repository (kimiyoung/transformer-xl, commit 44781ed). Needs tensorflow-cpu
2.21.0, in an environment of its own. That code was written for TensorFlow 1; what later versions lack of it
(tf.layers.dense, tf.layers.dropout without dropout, tf.contrib.layers.layer_norm) is given below.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

GOLDEN = Path(__file__).parent / "tensorflow"
TOKENS, ROWS, MEMORY, SEGMENTS = 5, 3, 7, 4
COMMON = {"n_token": 61, "n_layer": 2, "n_head": 3, "d_head": 2, "d_inner": 11, "clamp_len": 6}
MODELS = {
    "bytes": {"d_model": 10, "d_embed": 10},
    "words": {
        "d_model": 10,
        "d_embed": 10,
        "cutoffs": [13, 29, 40],
        "div_val": 2,
        "tie_projs": [False, True, True, True],
        "untie_r": True,
    },
    "sentences": {
        "d_model": 10,
        "d_embed": 10,
        "cutoffs": [13, 29],
        "div_val": 3,
        "tie_projs": [False] * 3,
        "untie_r": True,
        "proj_same_dim": False,
    },
    "narrow": {"d_model": 10, "d_embed": 7, "cutoffs": [13, 29], "tie_projs": [False, True, True]},
}


def dense(x, units, activation=None, use_bias=True, kernel_initializer=None, name=None):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape[-1], units], initializer=kernel_initializer)
        y = tf.tensordot(x, kernel, 1)
        if use_bias:
            y += tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    return activation(y) if activation else y


def layer_norm(x, begin_norm_axis):
    """As tf.contrib.layers.layer_norm: 1e-12 is added to the variance."""
    assert begin_norm_axis == -1
    with tf.variable_scope(None, "LayerNorm"):
        beta = tf.get_variable("beta", [x.shape[-1]], initializer=tf.zeros_initializer())
        gamma = tf.get_variable("gamma", [x.shape[-1]], initializer=tf.ones_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, variance_epsilon=1e-12)


def authors_model(folder):
    """Their module, with a TensorFlow that has what it asks for."""
    old = types.ModuleType("tensorflow")
    old.__dict__.update({name: getattr(tf, name) for name in dir(tf)})
    old.layers = types.SimpleNamespace(dense=dense, dropout=lambda x, *_, **__: x)
    old.contrib = types.SimpleNamespace(layers=types.SimpleNamespace(layer_norm=layer_norm))
    module = types.ModuleType("authors")
    sys.modules["tensorflow"] = old
    exec(compile((folder / "model.py").read_text(), "model.py", "exec"), module.__dict__)
    sys.modules["tensorflow"] = sys.modules["tensorflow.compat.v1"]
    module.mask_adaptive_logsoftmax = functools.partial(module.mask_adaptive_logsoftmax, return_mean=False)
    return module


def make(name, settings, folder):
    tf.reset_default_graph()
    random = np.random.default_rng(list(name.encode()))
    model = authors_model(folder)
    settings = {"cutoffs": [], "tie_projs": [], **COMMON, **settings}
    inputs = tf.placeholder(tf.int32, [TOKENS, ROWS])
    targets = tf.placeholder(tf.int32, [TOKENS, ROWS])
    memory = [tf.placeholder(tf.float32, [MEMORY, ROWS, settings["d_model"]]) for _ in range(settings["n_layer"])]
    losses, after = model.transformer(
        inputs,
        targets,
        memory,
        dropout=0.0,
        dropatt=0.0,
        initializer=tf.zeros_initializer(),
        is_training=False,
        mem_len=MEMORY,
        same_length=True,
        use_tpu=False,
        **settings,
    )
    variables = tf.trainable_variables()
    step = tf.train.get_or_create_global_step()
    if name == "words":  # as it is while training: with Adam's averages
        tf.train.AdamOptimizer().apply_gradients(
            list(zip(tf.gradients(losses, variables), variables, strict=True)), step
        )
    tokens = random.integers(0, settings["n_token"], (SEGMENTS * TOKENS + 1, ROWS))
    found = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for variable in variables:
            about = 1.0 if variable.name.endswith("gamma:0") else 0.0
            wide = 0.02 if "lookup_table" in variable.name else 0.3
            variable.load(random.normal(about, wide, variable.shape.as_list()).astype(np.float32), session)
        state = [np.zeros([MEMORY, ROWS, settings["d_model"]], np.float32) for _ in memory]
        for start in range(0, SEGMENTS * TOKENS, TOKENS):
            feed = {inputs: tokens[start : start + TOKENS], targets: tokens[start + 1 : start + TOKENS + 1]}
            nats, state = session.run([losses, after], {**feed, **dict(zip(memory, state, strict=True))})
            found.append(nats.reshape(TOKENS, ROWS))
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
        saver = tf.train.Saver(save_relative_paths=True)
        saver.save(session, str(GOLDEN / name / "model.ckpt"), global_step=17, write_meta_graph=False)
        values = {v.op.name: float(np.sum(session.run(v), dtype=np.float64)) for v in tf.global_variables()}
    expected = {
        "tokens": tokens.T.tolist(),
        "nats": np.concatenate(found).T.astype(np.float64).tolist(),
        "sums": values,
        "memory": MEMORY,
        "segment": TOKENS,
        "clamp": settings["clamp_len"],
    }
    (GOLDEN / name / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    tf.disable_v2_behavior()
    for one, its_settings in MODELS.items():
        make(one, its_settings, Path(sys.argv[1]))
