"""A server and its gateway, as most modules of this folder use them."""

import pytest

from utils.serving.gateway import Gateway


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


@pytest.fixture(scope="module")
def gateway(server):
    with Gateway(server) as gateway:
        yield gateway
