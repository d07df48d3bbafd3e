import pytest
import ray


@pytest.fixture(scope="module")
def ray_session():
    ray.init(num_cpus=2, include_dashboard=False, address="local", logging_level="ERROR")
    yield
    ray.shutdown()
