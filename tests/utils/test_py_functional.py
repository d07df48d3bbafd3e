"""Plain Python helpers."""

import os
import pickle
import time

import pytest
from omegaconf import OmegaConf

from verl.utils.py_functional import (
    DynamicEnum,
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    timeout_limit,
    union_two_dict,
)


class Colour(DynamicEnum):
    pass


class Shape(DynamicEnum):
    pass


def test_union_two_dict():
    first = {"a": 1}
    assert union_two_dict(first, {"a": 1, "b": [2]}) is first and first == {"a": 1, "b": [2]}
    with pytest.raises(AssertionError, match="'a'"):
        union_two_dict({"a": 1}, {"a": 2})


def test_append_to_dict():
    data = {}
    append_to_dict(data, {"loss": 1.0})
    append_to_dict(data, {"loss": 2.0, "kl": 0.1})
    assert data == {"loss": [1.0, 2.0], "kl": [0.1]}


def test_dynamic_enum():
    red = Colour.register("red")
    Colour.register("blue")
    assert Colour.RED is red is Colour.from_name("Red") is Colour["RED"]
    assert Colour.names() == ["RED", "BLUE"] and [member.value for member in Colour] == [0, 1] and len(Colour) == 2
    assert "RED" in Colour and red in Colour and "RED" not in Shape and len(Shape) == 0
    assert pickle.loads(pickle.dumps(red)) is red
    with pytest.raises(ValueError):
        Colour.register("RED")
    assert Colour.remove("blue").name == "BLUE" and not hasattr(Colour, "BLUE")
    with pytest.raises(KeyError):
        Colour.remove("blue")
    assert Colour.register("green").value == 2  # a number is not used twice


@pytest.mark.parametrize("use_signals", [False, True])
def test_time_limit(use_signals):
    @timeout_limit(seconds=0.3, use_signals=use_signals, error_message="too slow")
    def nap(seconds, result=None):
        time.sleep(seconds)
        if isinstance(result, Exception):
            raise result
        return result

    assert nap(0.0, result={"x": 1}) == {"x": 1} and nap.__name__ == "nap"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="too slow"):
        nap(600)
    assert time.monotonic() - began < 60
    with pytest.raises(KeyError):
        nap(0.0, result=KeyError("k"))


def test_time_limit_notices_a_child_that_dies():
    @timeout_limit(seconds=20)
    def die():
        os._exit(7)

    with pytest.raises(RuntimeError, match="exit code 7"):
        die()


def test_nested_namespace():
    tree = NestedNamespace({"a": {"b": {"c": 1}}, "d": [2]}, e=3)
    assert tree.a.b.c == 1 and tree.d == [2] and tree.e == 3


def test_convert_to_regular_types():
    config = OmegaConf.create({"a": [1, {"b": 2}], "c": "${a}"})
    plain = convert_to_regular_types({"x": config, "y": [config.a]})
    assert plain == {"x": {"a": [1, {"b": 2}], "c": [1, {"b": 2}]}, "y": [[1, {"b": 2}]]}
    assert type(plain["x"]) is dict and type(plain["y"][0]) is list
