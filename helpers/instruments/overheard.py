"""Run kernels in one of Pallas's interpreters, and hear what it complains of."""

import contextlib
import io
import logging

import jax


def overheard(run):
    """(what was printed, the error that was raised or None) of run(), which runs kernels interpreted.

    Of a race JAX 0.11 prints and goes on, later versions raise.
    """
    log, printed = logging.getLogger("jax._src.callback"), io.StringIO()
    was_disabled, log.disabled = log.disabled, True  # it has the same text, with its trace
    try:
        with contextlib.redirect_stdout(printed):
            jax.block_until_ready(run())
        return printed.getvalue(), None
    except Exception as error:
        with contextlib.suppress(Exception):
            jax.effects_barrier()  # or the next kernel might raise this error once more
        return printed.getvalue(), error
    finally:
        log.disabled = was_disabled
