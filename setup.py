"""Package metadata; the version stands in megatron_rl/__init__.py."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_rl/__init__.py").read_text()).group(1)
DOCS = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.26"]  # the site of docs/

setup(
    name="megatron-rl",
    version=VERSION,
    description="Co-training of several language models by reinforcement learning on Megatron-core",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["recipes/prompts/*.txt", "commands/starts/*.yaml", "report/page/*"]},
    install_requires=[
        "torch>=2.10",  # grouped_mm; products of bfloat16 factors with float32 sums
        "megatron-core>=0.16.1,<0.20",
        "transformers>=4.51",
        "safetensors>=0.5",
        "huggingface-hub>=0.26",
        "tokenizers>=0.21",
        "pydantic>=2.10",
        "pyyaml>=6",
        "math-verify[antlr4_13_2]>=0.8",
        "numpy",
        "psutil",  # megatron-core writes checkpoints with it and does not ask for it
        "rich>=13",
        "jinja2>=3.1",  # pages of reports
        "matplotlib>=3.8",
        "pyarrow>=16",
        "xxhash>=3",  # checksums of refits
        "cloudpickle>=3",  # reward functions of notebooks and scripts
        "aiohttp>=3.12",  # HTTP with engines
    ],
    extras_require={
        "vllm": ["vllm"],
        "sglang": ["sglang"],
        "datasets": ["datasets>=2.19"],
        "wandb": ["wandb"],
        "tensorboard": ["tensorboard"],
        "tasks": ["reasoning-gym==0.1.25", "gymnasium>=1.0", "bm25s>=0.3"],
        "agents": ["renderers==0.1.12", "httpx"],
        "real-model": ["gguf>=0.17"],  # reads the file of `make real-model`
        "te": ["transformer-engine[pytorch]"],
        "docs": DOCS,
        "dev": [
            *("pytest>=8", "hypothesis", "ruff>=0.8", "pyright>=1.1.390", "tensorboard", "datasets>=2.19"),
            *("renderers==0.1.12", "httpx", "gymnasium>=1.0", "bm25s>=0.3", "urllib3>=2.2"),
            *("peft>=0.17", "accelerate", "nbclient", "ipykernel", "wandb"),
            'triton>=3.3; platform_system == "Linux"',  # its interpreter runs kernels on a CPU
            *DOCS,
        ],
    },
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.main:program"]},
)
