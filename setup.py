"""The package and every pin.

Extras: `cpu` is a whole tried environment, exact, without SGLang (whose own metadata asks for the
CUDA set: the Makefile adds it with `--no-deps`); `gpu` names what a GPU machine needs and has not
been run on one; `test` adds the tools of `make test`, and math-verify, which the verdicts of the
scorer `math` are compared with.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

# What megarl itself imports, besides torch, megatron-core and SGLang, which the extras pin.
DIRECT = [
    "blake3>=1.0",
    "filelock>=3.12",
    "jsonschema>=4.20",
    "latex2sympy2_extended>=1.11,<1.12",
    "mpmath>=1.3",
    "numpy>=1.26",
    "pyarrow>=18",
    "pydantic>=2.10",
    "rich>=13",
    "ruamel.yaml>=0.18",
    "safetensors>=0.4",
    "sentencepiece>=0.2",
    "sympy>=1.13",
    "tensorboard>=2.15",
    "transformers>=5",
    "zstandard>=0.23",
]

CPU = """
absl-py==2.5.1
aiohappyeyeballs==2.7.1
aiohttp==3.14.5
aiosignal==1.4.0
annotated-doc==0.0.7
annotated-types==0.8.0
antlr4-python3-runtime==4.13.2
anyio==4.16.0
asttokens==3.0.2
attrs==26.1.0
blake3==1.0.11
certifi>=2025.1.31
charset-normalizer==3.5.3
click==8.5.1
compressed-tensors==0.18.0
dill==0.4.1
distro==1.9.0
einops==0.8.2
executing==2.3.0
fastapi==0.165.0
filelock==4.3.1
frozenlist==1.8.0
fsspec==2026.9.0
gguf==0.19.0
grpcio==1.85.3
h11==0.16.0
hf-xet==1.8.0
httpcore==1.0.9
httpx==0.28.1
huggingface_hub==1.33.0
idna==3.20
ipython==9.18.1
ipython_pygments_lexers==1.1.1
jedi==0.20.1
Jinja2==3.1.6
jiter==0.19.0
jsonschema-specifications==2025.9.1
jsonschema==4.26.0
latex2sympy2_extended==1.11.0
loguru==0.7.3
Markdown==3.11.3
markdown-it-py==4.3.0
MarkupSafe==3.0.4
matplotlib-inline==0.2.2
mdurl==0.1.2
megatron-core==0.16.1
mpmath==1.3.0
msgspec==0.23.0
multidict==7.2.1
networkx==3.6.1
numpy==2.4.6
openai==2.6.1
opentelemetry-api==1.45.2
orjson==3.13.0
packaging==26.4
parso==0.8.7
partial-json-parser==0.2.1.1.post7
pexpect==4.9.0
pillow==13.0.0
prompt_toolkit==3.0.53
propcache==0.5.4
protobuf==6.33.6
psutil==7.2.2
ptyprocess==0.7.0
pure_eval==0.2.4
pyarrow==26.0.1
pybase64==1.5.1
pydantic==2.14.4
pydantic_core==2.50.5
Pygments==2.21.0
PyYAML==6.0.4
pyzmq==27.3.0
referencing==0.37.0
regex==2026.11.19
requests==2.34.2
rich==15.0.0
rpds-py==2026.9.1
ruamel.yaml==0.19.1
safetensors==0.8.0
sentencepiece==0.2.1
setproctitle==1.3.8
shellingham==1.5.4
sniffio==1.3.1
stack-data==0.6.3
starlette==1.10.0
sympy==1.14.0
tensorboard==2.21.0
tensorboard-data-server==0.7.2
tokenizers==0.22.2
torch==2.13.0
tqdm==4.70.1
traitlets==5.16.1
transformers==5.12.1
typer==0.29.2
typing-inspection==0.4.5
typing_extensions==4.16.0
urllib3==2.8.0
uvicorn==0.54.0
wcwidth==0.9.4
Werkzeug==3.1.9
yarl==1.25.1
zstandard==0.25.0
""".strip().splitlines()

# Not yet run on a GPU. The range of transformer-engine is the one megatron-core 0.16.1 asks for.
GPU = [
    "torch==2.13.0",
    "megatron-core==0.16.1",
    "transformer-engine[core_cu13,pytorch]>=2.9,<2.12",
    "sglang==0.5.21",
    "sentencepiece==0.2.1",
    "protobuf<7",
    "numpy<2.5",
]

TEST = """
hypothesis==6.170.17
iniconfig==2.3.1
math-verify==0.9.0
pluggy==1.7.0
pytest==9.2.0
pytest-timeout==2.4.0
ruff==0.17.6
sortedcontainers==2.4.0
""".strip().splitlines()

version = re.search(r'__version__ = "(.+)"', Path("megarl/__init__.py").read_text()).group(1)

setup(
    name="megarl",
    version=version,
    description="Reinforcement learning of language models on Megatron-Core with in-process SGLang",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["megarl", "megarl.*"]),
    install_requires=DIRECT,
    extras_require={"cpu": CPU, "gpu": GPU, "test": TEST},
)
