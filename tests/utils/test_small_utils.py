"""Metrics, ports, devices, the object store and random generators."""

import pickle
import random
import socket

import numpy as np
import pytest
import ray
import torch

from verl.utils import device, net_utils, rng
from verl.utils.metric import reduce_metrics
from verl.utils.ray_utils import parallel_put


def test_reduce_metrics_by_name():
    reduced = reduce_metrics(
        {"loss": [1.0, 2.0, 6.0], "length/max": [3, 9], "length/min": np.array([3, 9]), "nothing": []}
    )
    assert reduced == {"loss": 3.0, "length/max": 9.0, "length/min": 3.0}
    assert all(type(value) is float for value in reduced.values())


def test_free_port_can_be_listened_on():
    port = net_utils.get_free_port()
    with socket.socket() as server:
        server.bind(("", port))
    assert port < 32768  # below the ports of outgoing connections


def test_addresses():
    assert net_utils.is_ipv4("10.0.0.1") and not net_utils.is_ipv4("::1") and not net_utils.is_ipv4("10.0.0")
    assert net_utils.is_ipv6("::1") and not net_utils.is_ipv6("10.0.0.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without GPU")
def test_device_without_gpu():
    assert (device.get_device_name(), device.get_device_id(), device.get_dist_backend()) == ("cpu", 0, "gloo")
    assert device.get_torch_device() is torch.cpu
    with pytest.raises(RuntimeError, match="gloo"):
        device.get_nccl_backend()


def test_parallel_put_keeps_the_order():
    ray.init(num_cpus=1, include_dashboard=False, address="local", logging_level="ERROR")
    try:
        data = [np.full(1000, index) for index in range(20)]
        values = ray.get(parallel_put(data, max_workers=4), timeout=60)
        assert [int(value[0]) for value in values] == list(range(20))
        with pytest.raises(AssertionError):
            parallel_put([])
    finally:
        ray.shutdown()


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_generators_go_on_as_if_nothing_had_been_drawn():
    state = pickle.loads(pickle.dumps(rng.get_rng_state()))
    first = draws()
    assert draws() != first
    rng.set_rng_state(state)
    with pytest.raises(KeyError), rng.preserved_rng():
        draws()
        raise KeyError
    assert draws() == first
