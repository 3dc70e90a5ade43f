"""What a GPU can do at best, by its datasheet: memory, matrix rate, bandwidth, and the roof they make.

The roofline model bounds a computation from two sides at once: the matrix units need at least
FLOPs / matrix_rate seconds, the memory at least bytes / bandwidth, and the two can overlap. These
are figures that a manufacturer prints, not measurements: a real kernel reaches less of both.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One GPU, by its datasheet.

    name: as people call it.
    memory: bytes of memory. Its "GB" are powers of two, as memory chips are made; a little of it
      is taken by the driver.
    matrix_rate: FLOP/s of 16-bit matrix products with float32 sums, without structured sparsity.
    bandwidth: bytes/s between the memory and the chip.

    Sources, all by NVIDIA: Turing architecture whitepaper (T4), Ada architecture whitepaper
    (RTX 4090), A100 datasheet (SXM), H100 datasheet (SXM) and H200 datasheet (SXM). The last two
    print rates with sparsity, twice those given here.
    """

    name: str
    memory: int
    matrix_rate: float
    bandwidth: float

    @property
    def ridge(self):
        """FLOPs per byte at which both bounds are equal: below it the memory is the slower side."""
        return self.matrix_rate / self.bandwidth


T4 = GPU("T4", 16 * GIB, 65e12, 320e9)
RTX_4090 = GPU("RTX 4090", 24 * GIB, 165e12, 1008e9)
A100_40GB = GPU("A100 40 GB", 40 * GIB, 312e12, 1555e9)
A100_80GB = GPU("A100 80 GB", 80 * GIB, 312e12, 2039e9)
H100 = GPU("H100", 80 * GIB, 989e12, 3350e9)
H200 = GPU("H200", 141 * GIB, 989e12, 4800e9)
GPUS = (T4, RTX_4090, A100_40GB, A100_80GB, H100, H200)


def attainable(gpu, intensity):
    """The largest rate, in FLOP/s, at an intensity in FLOPs per byte moved."""
    return min(gpu.matrix_rate, intensity * gpu.bandwidth)
