"""Malformed HTTP requests, drawn from a seed: the bytes that are sent, from wrong values to no HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

POSTS = ["completions", "chat/completions", "sessions", "sessions/import"]
PATHS = [*(f"/v1/{name}" for name in POSTS), "/tokenize", "/detokenize", "/attention"]
FIELDS = """model prompt max_tokens temperature top_p top_k min_p n best_of stop seed echo logprobs stream messages
stream_options session memory_length tokens user suffix position add_special_tokens return_tokens_as_token_ids
presence_penalty logit_bias max_completion_tokens top_logprobs no_such_field __proto__""".split()  # noqa: SIM905
NUMBERS = [0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324, 1e16]
STRINGS = ["", "tiny", "new", "a", "\0", "\ud800", "\U0010ffff", "../../etc/passwd", "%00", "\u202e", "x" * 3000, "NaN"]
# JSON that Python's encoder does not write
LITERALS = [
    "NaN",
    "-Infinity",
    "1e999",
    "-" + "9" * 5000,
    "1" * 5000 + ".5",
    '"\\ud800"',
    '"\\u00"',
    "[" * 3000,
    "{" * 99,
]
LITERALS += ['{"a":' * 2000, "[" * 900 + "]" * 900, "tru", "01", "+1", "'a'", '"\\x00"', '"\x00"', "\ufeff1", "/**/1"]


def value(draw: random.Random, depth: int = 0) -> object:
    """Return a value of any type."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind < 6:
        return draw.choice([None, True, False, draw.choice(NUMBERS), draw.choice(STRINGS), draw.randrange(-3, 300)])
    inner = [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return inner if kind < 8 else {draw.choice([*FIELDS, *STRINGS]): one for one in inner}


def body(draw: random.Random, path: str) -> bytes:
    """Return a body: a right one with wrong fields, or with a literal that is no JSON, or cut."""
    fields: dict[str, object] = {"model": "tiny", "prompt": "abc"} if draw.random() < 0.8 else {}
    if "chat" in path:
        fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    if path == "/detokenize":
        fields = {"tokens": [97]}
    for name in draw.sample(FIELDS, draw.randrange(4)):
        fields[name] = value(draw)
    text = json.dumps(fields)
    change = draw.randrange(5)
    if change == 0:
        text = text.replace(":", f": {draw.choice(LITERALS)}, {json.dumps(draw.choice(FIELDS))}:", 1)
    elif change == 1:
        text = draw.choice(
            [text[: draw.randrange(len(text) + 1)], draw.choice(LITERALS), f"[{text}]", text * 2, "null"]
        )
    elif change == 2 and draw.random() < 0.3:
        return draw.choice([text.encode("utf-16"), b"\xff" + text.encode(), draw.randbytes(99), b"\x1f\x8b\x08" * 9])
    return text.encode("utf-8", "surrogatepass")


def message(method: str, path: str, headers: list[tuple[str, str]], content: bytes, version: str = "1.1") -> bytes:
    """Return a request as it is sent."""
    head = [f"{method} {path} HTTP/{version}", *(f"{name}: {text}" for name, text in headers)]
    return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + content


def usual(content: bytes, kind: str = "application/json") -> list[tuple[str, str]]:
    """Return the headers of a right request."""
    length = ("Content-Length", str(len(content)))
    return [("Host", "localhost"), ("Content-Type", kind), length, ("Connection", "close")]


def wrong_body(draw: random.Random) -> bytes:
    """Return a request with a wrong body."""
    path = draw.choice(PATHS)
    content = body(draw, path)
    kind = "application/octet-stream" if path.endswith("import") else "application/json"
    return message("POST", path, usual(content, kind), content)


def wrong_header(draw: random.Random) -> bytes:
    """Return a request with headers that are wrong, doubled, missing or huge."""
    path = draw.choice(PATHS)
    content = body(draw, path)
    headers = usual(content)
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice(["Host", "Content-Type", "Content-Length", "Transfer-Encoding", "Origin", "Authorization"])
        texts = [
            "",
            "localhost",
            "evil.example",
            "text/plain",
            "application/json; charset=utf-16",
            "multipart/form-data",
        ]
        texts += [
            "-1",
            "99999999999999999999",
            "0x10",
            "1e3",
            "chunked",
            "gzip, chunked",
            "null",
            "Bearer x",
            "\xff\xfe",
        ]
        entry = (draw.choice([name, name, "X-Session", "Expect", "X-" + "a" * 99]), draw.choice([*texts, "y" * 70_000]))
        if draw.random() < 0.5:
            headers = [other for other in headers if other[0] != entry[0]]
        headers.insert(draw.randrange(len(headers) + 1), entry)
    return message("POST", path, headers, content)


def wrong_path(draw: random.Random) -> bytes:
    """Return a request of a path, a method or a session that does not exist."""
    parts = [
        "v1",
        "sessions",
        "models",
        "completions",
        "..",
        ".",
        "",
        "%2e%2e",
        "%00",
        "%ff",
        "%ud800",
        "session-" + "A" * 32,
    ]
    parts += [
        "session-..%2f..%2fetc",
        "branch",
        "snapshot",
        "export",
        "page",
        "page.js",
        "\xe9",
        "a" * 5000,
        "*",
        "?a=%zz",
    ]
    path = "/" + "/".join(draw.choice(parts) for _ in range(draw.randrange(1, 5)))
    method = draw.choice(
        ["GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "get", "BREW", "G\xe9T"]
    )
    content = b"{}" if method in ("POST", "PUT", "PATCH") else b""
    query = draw.choice(["", "", "?model=%00", "?model=" + "x" * 3000, "?=&&=", "#x"])
    return message(method, draw.choice([path, path, "*", "http://evil.example/", ""]) + query, usual(content), content)


def wrong_session(draw: random.Random) -> bytes:
    """Return a request with a session that does not exist, or the file of one that is none."""
    identity = draw.choice(["session-" + "A" * 32, "snapshot-x", "..", "\0", "session-" + "\u00e9" * 32, "new/..", " "])
    if draw.random() < 0.5:
        content = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, "session": identity}).encode()
        return message("POST", "/v1/completions", usual(content), content)
    header = json.dumps({"__metadata__": {"transformer_xl": json.dumps({"session": json.dumps(value(draw))})}}).encode()
    size = draw.choice([len(header), 0, 2**63, 2**20])
    content = draw.choice([draw.randbytes(draw.randrange(200)), size.to_bytes(8, "little") + header])
    return message("POST", "/v1/sessions/import", usual(content, "application/octet-stream"), content)


def too_large(draw: random.Random) -> bytes:
    """Return a request whose body is too large, or is said to be."""
    size = draw.choice([2**16, 2**17])
    content = b'{"model": "tiny", "prompt": "' + b"a" * size + b'"}'
    if draw.random() < 0.5:
        return message("POST", "/v1/completions", usual(content), content)
    headers = [*usual(b"")[:2], ("Transfer-Encoding", "chunked"), ("Connection", "close")]
    chunk = f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n"
    return message("POST", "/tokenize", headers, chunk)


def no_http(draw: random.Random) -> bytes:
    """Return what is no request, or only the beginning of one."""
    right = wrong_body(draw)
    return draw.choice(
        [
            draw.randbytes(draw.randrange(1, 300)),
            right[: draw.randrange(1, len(right))],
            right.replace(b"HTTP/1.1", draw.choice([b"HTTP/9.9", b"HTTP/1.1 x", b"HTTP/1.0", b""]), 1),
            right.replace(b"\r\n", b"\n"),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(60),  # TLS
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        ]
    )


KINDS: list[Callable[[random.Random], bytes]] = [
    *[wrong_body] * 5,
    *[wrong_header] * 2,
    *[wrong_path] * 2,
    wrong_session,
    too_large,
    no_http,
]


def malformed(seed: int) -> tuple[bytes, bool]:
    """Return request `seed`, and whether it may have no end, so that the client must say that nothing follows."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    return kind(draw), kind is no_http
