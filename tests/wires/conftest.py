"""What the tests between hosts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.network_namespaces import NoNamespacesError, TwoHosts, two_hosts


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        with two_hosts() as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces: {error}")
