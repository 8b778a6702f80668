"""Every test of this folder that asks for a method runs over all that are registered."""

from __future__ import annotations

import pytest

from fedsieve.methods import METHODS
from fedsieve.methods.contract import Method


@pytest.fixture(params=sorted(METHODS))
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]
