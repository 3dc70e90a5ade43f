"""A real sentence as input: words become vectors by the letters they are made of.

No model is downloaded. A word's vector sums one pseudo-random vector of signs for each run of
three letters in it, so words that share letters (kernel, kernels) get similar vectors, and
attention between them is something a reader can check by eye.
"""

import zlib

import numpy as np

SENTENCE = (
    "a kernel reads each tile once while other kernels read every tile again "
    "so the fast kernel is the one that reads less"
)


def words(sentence=SENTENCE):
    """The words of a sentence, in order."""
    return sentence.split()


def embed(tokens, head_dim, dtype=np.float32):
    """One unit vector for each word, shape (len(tokens), head_dim)."""
    vectors = np.zeros((len(tokens), head_dim))
    for vector, token in zip(vectors, tokens, strict=True):
        padded = f" {token} "
        for start in range(len(padded) - 2):
            seed = zlib.crc32(padded[start : start + 3].encode())
            vector += np.random.default_rng(seed).choice([-1.0, 1.0], head_dim)
        vector /= np.linalg.norm(vector)
    return vectors.astype(dtype)
