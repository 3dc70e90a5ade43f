"""The attention map of notebook 00, which later notebooks draw too."""

import numpy as np

from helpers.plots import style


def attention_map(weights, queries, keys=None, title="Who looks at whom"):
    """A (T, S) table of weights, one row for each query, labelled by words."""
    keys = queries if keys is None else keys
    size = 0.27 * max(len(queries), len(keys)) + 1.6
    figure, axes = style.subplots(width=size + 0.8, height=size)
    image = axes.imshow(weights, cmap=style.PROBABILITY_MAP, vmin=0, vmax=max(1e-9, float(np.max(weights))))
    axes.set_xticks(range(len(keys)), keys, rotation=90, size=9)
    axes.set_yticks(range(len(queries)), queries, size=9)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(title)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.7)
    return figure
