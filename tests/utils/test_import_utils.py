"""Optional packages and users' files."""

import pickle
import subprocess
import sys
import warnings

import pytest

from verl.utils.import_utils import deprecated, import_external_libs, is_vllm_available, load_extern_type


def test_load_extern_type(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from dataclasses import dataclass\nLIMIT = 3\n@dataclass\nclass Box:\n    size: int\n")
    assert load_extern_type(str(file), "LIMIT") == 3
    box = load_extern_type(file, "Box")(2)
    assert pickle.loads(pickle.dumps(box)).size == 2
    assert load_extern_type(None, "Box") is None
    with pytest.raises(AttributeError, match="Missing"):
        load_extern_type(file, "Missing")
    with pytest.raises(FileNotFoundError):
        load_extern_type(tmp_path / "other.py", "Box")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(RuntimeError, match="broken.py") as caught:
        load_extern_type(tmp_path / "broken.py", "Box")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_external_libs(tmp_path, monkeypatch):
    (tmp_path / "registers_something.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import_external_libs(None)
    import_external_libs("registers_something")
    assert "registers_something" in sys.modules
    with pytest.raises(ValueError, match="external_lib.*no_such_module"):
        import_external_libs(["json", "no_such_module"])


def test_availability_is_a_bool():
    assert is_vllm_available() in (True, False)


def test_deprecated():
    @deprecated("new")
    def old(x):
        return x

    @deprecated()
    class Old:
        def __init__(self, x):
            self.x = x

    with pytest.warns(FutureWarning, match="old is deprecated; use new instead"):
        assert old(1) == 1
    with pytest.warns(FutureWarning, match="Old is deprecated"):
        assert Old(2).x == 2 and isinstance(Old, type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deprecated("x")(len)  # only the call warns


def test_importing_the_package_loads_neither_torch_nor_ray():
    code = "import sys, verl; assert verl.__version__; assert not {'torch', 'ray', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
