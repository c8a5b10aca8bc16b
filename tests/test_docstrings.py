"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hotslot

MODULES = sorted(info.name for info in pkgutil.walk_packages(hotslot.__path__, "hotslot.") if not info.name.endswith("__main__"))

NEEDS = {
    "hotslot.ops.cupy_launcher": ("cupy",),
    "hotslot.ops.bindings_launcher": ("cuda.bindings",),
    "hotslot.ray": ("ray.serve",),
}
"""Packages that a module imports and that not every machine has."""


@pytest.mark.usefixtures("smollm_folder")
@pytest.mark.parametrize("name", ["hotslot", *MODULES])
def test_the_examples_of_a_module_print_what_they_show(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
