# make quickstart   a virtual environment, a small model, three minutes of training, and what it learnt
# make test         a virtual environment and the tests
# make venv         only the virtual environment, .venv
# make clean        removes it

.PHONY: venv test quickstart clean

venv: .venv/ready

test: .venv/ready-for-tests
	.venv/bin/python -m pytest --numprocesses=2 --dist=loadfile

quickstart: .venv/ready
	.venv/bin/mlxft train +recipe=quickstart

clean:
	rm -rf .venv

.venv/ready: pyproject.toml .ci/environment
	.ci/environment
	@touch $@

.venv/ready-for-tests: pyproject.toml .ci/environment
	.ci/environment dev
	@touch $@ .venv/ready
