"""Compiles the token path with mypyc, where POTLUCK_COMPILE=1 asks for it (ADR 0011).

Everything else about the package stands in pyproject.toml.
"""

import os

from setuptools import setup

COMPILED = (
    "adapters/clock",
    "adapters/ids",
    "core/grants",
    "core/ids",
    "core/merkle",
    "core/parameters",
    "core/pricing",
    "core/receipts",
    "core/refusals",
    "core/replay",
    "core/replicas",
    "core/routing",
    "gateway/http/access",
    "gateway/http/exchange",
    "gateway/http/sse",
    "gateway/serving/conversations",
    "gateway/serving/countersign",
    "gateway/serving/keys",
    "gateway/serving/limits",
    "gateway/serving/links",
    "gateway/serving/purses",
    "gateway/serving/requests",
    "gateway/serving/serving",
    "gateway/serving/speech",
    "gateway/serving/table",
)
"""What each request meets. Dataclasses in these have no `slots=True`: mypyc cannot have it, and
compiled classes need none."""


def compiled() -> list[object]:
    if os.environ.get("POTLUCK_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    paths = [f"src/potluck/{module}.py" for module in COMPILED]
    return mypycify(paths, opt_level="3", debug_level="0", group_name="potluck")


setup(ext_modules=compiled())
