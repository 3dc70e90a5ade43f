"""The shared code of the notebooks. ``from helpers import flash_attention`` is where to begin."""

from helpers.attention.public.api import flash_attention
from helpers.attention.public.paged import paged_attention

__all__ = ["flash_attention", "paged_attention"]
