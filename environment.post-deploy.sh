#!/usr/bin/env bash
# Snakemake runs this in the environment that it has made of environment.yml, in the folder where it
# was started: the checkout.
set -eu
python -m pip install --no-deps --editable .
