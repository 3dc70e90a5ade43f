"""Builds the site of the series: `python -m helpers.site`, which `make site` calls in an environment that can."""

import argparse
import sys
import time
from pathlib import Path

from helpers.site.build import SITE, BuildError, build


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=SITE, help="the folder to build in; default: site")
    parser.add_argument("--repository", default="", help="public address of the series; without it no page leads there")
    parser.add_argument("--revision", default="", help="branch, tag or commit that the buttons show; default: main")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        revision = options.revision or "main"
        build(options.target, repository=options.repository, revision=revision)
    except BuildError as reason:
        sys.exit(f"No new site: {reason}.")
    print(f"{options.target}/index.html is ready, after {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
