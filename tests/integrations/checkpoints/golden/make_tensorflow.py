"""Make the files in tensorflow/: small checkpoints that TensorFlow writes, and the losses of the authors' model.

    python make_tensorflow.py FOLDER

FOLDER contains tf/model.py of the authors' repository (kimiyoung/transformer-xl, commit 44781ed). This needs
tensorflow-cpu 2.21.0, in an environment of its own. The authors' code was written for TensorFlow 1; the functions that
later versions lack (tf.layers.dense, tf.layers.dropout, tf.contrib.layers.layer_norm) are defined below.
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
SEGMENT_LENGTH, BATCH_SIZE, MEMORY_LENGTH, NUM_SEGMENTS = 5, 3, 7, 4
# Settings by the names of the authors' code. Cutoffs are the token ids at which the vocabulary is split into clusters.
COMMON = {"n_token": 61, "n_layer": 2, "n_head": 3, "d_head": 2, "d_inner": 11, "clamp_len": 6, "d_model": 10}
# the model's variants: as for enwik8, WikiText-103 and One Billion Word, and with embeddings narrower than the model
MODELS = {
    "bytes": {"d_embed": 10},
    "words": {
        "d_embed": 10, "cutoffs": [13, 29, 40], "div_val": 2, "tie_projs": [False, True, True, True], "untie_r": True,
    },
    "sentences": {
        "d_embed": 10, "cutoffs": [13, 29], "div_val": 3, "tie_projs": [False] * 3, "untie_r": True,
        "proj_same_dim": False,
    },
    "narrow": {"d_embed": 7, "cutoffs": [13, 29], "tie_projs": [False, True, True]},
}  # fmt: skip


def dense(x, units, activation=None, use_bias=True, kernel_initializer=None, name=None):
    """Replace tf.layers.dense."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape[-1], units], initializer=kernel_initializer)
        y = tf.tensordot(x, kernel, 1)
        if use_bias:
            y += tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
    return activation(y) if activation else y


def layer_norm(x, begin_norm_axis):
    """Replace tf.contrib.layers.layer_norm, which adds 1e-12 to the variance."""
    assert begin_norm_axis == -1
    with tf.variable_scope(None, "LayerNorm"):
        beta = tf.get_variable("beta", [x.shape[-1]], initializer=tf.zeros_initializer())
        gamma = tf.get_variable("gamma", [x.shape[-1]], initializer=tf.ones_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, variance_epsilon=1e-12)


def import_authors_model(folder):
    """Return the authors' model.py as a module, executed with a `tensorflow` that has the functions it uses."""
    tensorflow_1 = types.ModuleType("tensorflow")
    tensorflow_1.__dict__.update({name: getattr(tf, name) for name in dir(tf)})
    tensorflow_1.layers = types.SimpleNamespace(dense=dense, dropout=lambda x, *_, **__: x)
    tensorflow_1.contrib = types.SimpleNamespace(layers=types.SimpleNamespace(layer_norm=layer_norm))
    module = types.ModuleType("authors")
    sys.modules["tensorflow"] = tensorflow_1
    exec(compile((folder / "model.py").read_text(), "model.py", "exec"), module.__dict__)
    sys.modules["tensorflow"] = sys.modules["tensorflow.compat.v1"]
    module.mask_adaptive_logsoftmax = functools.partial(module.mask_adaptive_logsoftmax, return_mean=False)
    return module


def make(name, settings, folder):
    """Write a checkpoint with random weights, and the losses of random tokens in nats, to a folder of this name."""
    tf.reset_default_graph()
    generator = np.random.default_rng(list(name.encode()))
    model = import_authors_model(folder)
    settings = {"cutoffs": [], "tie_projs": [], **COMMON, **settings}
    inputs, targets = (tf.placeholder(tf.int32, [SEGMENT_LENGTH, BATCH_SIZE]) for _ in range(2))
    memory_shape = [MEMORY_LENGTH, BATCH_SIZE, settings["d_model"]]
    memory = [tf.placeholder(tf.float32, memory_shape) for _ in range(settings["n_layer"])]
    # same_length: each query attends to MEMORY_LENGTH + 1 keys; the variables get random values below
    losses, new_memory = model.transformer(
        inputs, targets, memory, dropout=0.0, dropatt=0.0, initializer=tf.zeros_initializer(), is_training=False,
        mem_len=MEMORY_LENGTH, same_length=True, use_tpu=False, **settings,
    )  # fmt: skip
    variables = tf.trainable_variables()
    step = tf.train.get_or_create_global_step()
    if name == "words":  # a checkpoint of training, which also contains Adam's averages
        gradients = tf.gradients(losses, variables)
        tf.train.AdamOptimizer().apply_gradients(list(zip(gradients, variables, strict=True)), step)
    num_targets = NUM_SEGMENTS * SEGMENT_LENGTH
    tokens = generator.integers(0, settings["n_token"], (num_targets + 1, BATCH_SIZE))
    nats = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for variable in variables:
            mean = 1.0 if variable.name.endswith("gamma:0") else 0.0  # gamma: the scale of a LayerNorm
            std = 0.02 if "lookup_table" in variable.name else 0.3
            variable.load(generator.normal(mean, std, variable.shape.as_list()).astype(np.float32), session)
        state = [np.zeros(memory_shape, np.float32) for _ in memory]
        for start in range(0, num_targets, SEGMENT_LENGTH):
            stop = start + SEGMENT_LENGTH
            feed = {inputs: tokens[start:stop], targets: tokens[start + 1 : stop + 1]}
            segment_nats, state = session.run([losses, new_memory], {**feed, **dict(zip(memory, state, strict=True))})
            nats.append(segment_nats.reshape(SEGMENT_LENGTH, BATCH_SIZE))
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
        saver = tf.train.Saver(save_relative_paths=True)
        saver.save(session, str(GOLDEN / name / "model.ckpt"), global_step=17, write_meta_graph=False)
        # the sum of the elements of each variable, for the test that reads the files
        sums = {v.op.name: float(np.sum(session.run(v), dtype=np.float64)) for v in tf.global_variables()}
    expected = {
        "tokens": tokens.T.tolist(), "nats": np.concatenate(nats).T.astype(np.float64).tolist(), "sums": sums,
        "memory": MEMORY_LENGTH, "segment": SEGMENT_LENGTH, "clamp": settings["clamp_len"],
    }  # fmt: skip
    (GOLDEN / name / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    tf.disable_v2_behavior()
    for model_name, model_settings in MODELS.items():
        make(model_name, model_settings, Path(sys.argv[1]))
