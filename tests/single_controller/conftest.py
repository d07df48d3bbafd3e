import controller_workers
import pytest
import ray
from ray import cloudpickle

# The test folder is not on the workers' path, so classes out of it are sent by value.
cloudpickle.register_pickle_by_value(controller_workers)


@pytest.fixture(scope="module")
def ray_session():
    # The accelerators exist only in Ray's books.
    ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, address="local", logging_level="ERROR", log_to_driver=False
    )
    yield
    ray.shutdown()
