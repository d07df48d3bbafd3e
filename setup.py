"""Packaging: ``verl``, ``agent_system`` and ``gigpo`` with their data files."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
GYM_FACES = "agent_system.environments.env_package.webshop.gym_faces"
PACKAGES = ("verl", "agent_system", "gigpo")
DATA = (
    "*.yaml",
    "*.json",
    "*.jsonl",
    "*.txt",
    "*.md",
    "*.safetensors",
    "*.jinja",
    "*.html",
    "*.css",
    "*.js",
    "*.svg",
    "*.gz",
    "*.npz",
    "version",
)


def requirements(name: str) -> list[str]:
    """Lines of a requirement file without comments and references to other files."""
    lines = (line.split("#", 1)[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-")]


setup(
    name="verl-agent",
    version=(ROOT / "verl" / "version" / "version").read_text(encoding="utf-8").strip(),
    description="Reinforcement learning of language-model agents over many turns, distributed with Ray, FSDP and vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.13",
    packages=find_namespace_packages(
        include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")],
        exclude=["*.__pycache__", "*.__pycache__.*"],
    ),
    package_data={"": list(DATA)},
    include_package_data=False,
    install_requires=[*requirements("requirements.txt"), "torch>=2.11"],
    # gym finds WebAgentTextEnv-v0 by itself; gymnasium looks at no entry points since 1.0
    entry_points={"gym.envs": [f"__root__ = {GYM_FACES}:register_gym"]},
    extras_require={"gpu": requirements("requirements/gpu.txt"), "test": requirements("requirements/dev.txt")},
)
