# Every target sets up what is missing first; a second call does no work twice.
# Set-up needs only this file, git and Python 3.11 or 3.12 (PYTHON=/path/to/python names another).

PORT ?= 8888
HOST ?= 127.0.0.1
BOARD ?= 8765
HUB ?= 8001
HTTP ?= 8000
GRPC ?= 8001
METRICS ?= 8002
MODEL ?= models/base
TP ?= 2
SETUP = python=$$(sh utils/workshop/find_python.sh) && "$$python" utils/workshop/setup.py
BOOK = python=$$(sh utils/workshop/find_python.sh) && "$$python" utils/workshop/book.py
RUN = .venv/bin/python -m
PEERS = $(if $(NANOGPT),--nanogpt $(NANOGPT)) $(if $(LITGPT),--litgpt $(LITGPT))

.DEFAULT_GOAL := help
.SILENT:
.PHONY: help setup ready update lab grade class hub check test test-all test-kernels course book slides progress refresh labs lock base-model export serve bench gpu lint clean

help:      ## this list
	awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:     ## make the environment in .venv (once, a few minutes; TORCH=cpu|cuda|rocm TRITON=no)
	$(SETUP)

ready:
	$(SETUP) --quiet

update: ready ## bring in the course's corrections; what you changed in notebooks and labs stays
	PATH="$(CURDIR)/.venv/bin:$$PATH" docs/class/pull.sh "$$(git remote get-url origin)" "$$(git branch --show-current)" .
	$(SETUP)

lab: ready ## open JupyterLab where you left off (PORT=8888; CLASS=address reports to a class)
	$(RUN) utils.workshop.lab --port $(PORT) $(if $(CLASS),--class '$(CLASS)')

class: ready ## show an instructor how the room is doing (HOST=address BOARD=8765; docs/class.md)
	$(RUN) utils.classroom --host $(HOST) --port $(BOARD) $(if $(URL),--url '$(URL)')

hub: ready ## seats on this machine for a class without machines (HOST=address HUB=8001 DOMAIN=name SEATS=40; docs/class/hub.md)
	$(RUN) utils.hub --host $(HOST) --port $(HUB) $(if $(DOMAIN),--domain '$(DOMAIN)') $(if $(SEATS),--seats $(SEATS))

grade: ready ## run the labs' checks on what a class has handed in (FOLDERS="hand-in/*" OUT=grades.csv)
	$(RUN) utils.hub.grade $(FOLDERS) --out $(or $(OUT),grades.csv)

check: ready ## can this machine run the workshop? (two minutes; run this first)
	$(RUN) tests.check

test: ready ## run the tests: every notebook, every proof, a right and a wrong answer per exercise
	$(RUN) pytest -n 3

test-all: ready ## run all tests: every wrong answer, faults, kills, the hub, the book
	$(RUN) pytest -n 3 -m ""

test-kernels: ready ## every notebook with the kernels of older processors, and on busy cores (an hour and a half; NB=…)
	$(RUN) tests.notebooks.other_kernels $(NB)

course: ready ## run every notebook without a browser and show seconds and result
	$(RUN) utils.workshop.course $(NB)

book:      ## make the lessons, labs and docs into a web site, build/book (needs no other set-up)
	$(BOOK) book

slides:    ## make an instructor's slides for each lesson, build/slides (needs no other set-up)
	$(BOOK) slides

progress: ready ## what you have done so far
	$(RUN) utils.course.progress

refresh: ready ## run and store notebooks, outputs included (NB=notebooks/00_start_here.ipynb)
	$(RUN) utils.workshop.refresh $(NB)

labs: ready ## make the learner's copies of the labs from their solutions (FORCE=1)
	$(RUN) utils.workshop.labs $(if $(FORCE),--force)

lock: ready ## resolve requirements.in into requirements.txt (UPGRADE=1)
	$(RUN) utils.workshop.lock $(if $(UPGRADE),--upgrade)

base-model: ready ## pretrain, measure and describe the models in models/ again (hours on two cores)
	$(RUN) models.build train
	$(RUN) models.build measure
	$(RUN) models.build card

export: ready ## fill the Triton model repository (MODEL=models/base TP=2)
	$(RUN) utils.serving.export --model $(MODEL) --tp $(TP)

serve: ready ## serve triton_model_repo/ until Ctrl-C (HTTP=8000 GRPC=8001 METRICS=8002 LOG=file)
	$(RUN) utils.serving.server --http $(HTTP) --grpc $(GRPC) --metrics $(METRICS) $(if $(LOG),--log '$(LOG)')

bench: ready ## measure ranks, training, memory, mixes, contexts, formats and a class against their peers (NANOGPT=clone LITGPT=folder)
	$(RUN) tests.bench.bench_ranks
	$(RUN) tests.bench.bench_train $(PEERS)
	$(RUN) tests.bench.bench_memory
	$(RUN) tests.bench.bench_parallel
	$(RUN) tests.bench.bench_context
	$(RUN) tests.bench.bench_planner
	$(RUN) tests.bench.bench_formats
	$(RUN) tests.bench.bench_compile
	$(RUN) tests.bench.bench_class --kill

gpu: ready ## all that needs an NVIDIA GPU, in at most 60 minutes; fills docs/reference/<gpu>.json (PARTS="adamw serving" NANOGPT=clone GPTFAST=clone)
	$(RUN) tests.gpu $(if $(PARTS),--only $(PARTS))

lint: ready ## ruff over code and notebooks, the order of the rooms, the notebooks' hygiene
	$(RUN) ruff check
	.venv/bin/lint-imports --no-cache
	$(RUN) pytest -q tests/notebooks/test_static.py

clean:     ## remove what running made (.venv and your own progress stay)
	rm -rf tests/artifacts build .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -print0 | xargs -0 rm -rf
