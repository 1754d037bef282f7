# SPDX-License-Identifier: Apache-2.0
"""Leaves a prefill server, a decode server and the router running: `make serve`."""

import argparse
import pathlib
import sys
import time

from kvferry.demo import state
from kvferry.demo.model import default_model_path
from kvferry.demo.ports import LOOPBACK, LOOPBACKS
from kvferry.demo.processes import ProcessError, Processes, exit_on_signals
from kvferry.demo.progress import Progress
from kvferry.demo.stack import Stack

_CHECK_SECONDS = 0.5
_HELP = """
Running:
  router   {router}
  prefill  {prefill}
  decode   {decode}
  logs     {logs}

Try, in another terminal:
  make chat

  curl -sN {router}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "default", "stream": true, "max_tokens": 64,
    "messages": [{{"role": "user", "content": "What is a ferry?"}}]}}'

  python - <<'END'
  import openai
  client = openai.OpenAI(base_url="{router}/v1", api_key="none")
  answer = client.chat.completions.create(
      model="default", max_tokens=64, messages=[{{"role": "user", "content": "What is a ferry?"}}])
  print(answer.choices[0].message.content)
  END

Ctrl-C ends everything.
"""


def serve(stack: Stack, path: pathlib.Path, progress: Progress) -> None:
    """Prints how to use a started stack and waits until something ends it.

    Args:
      stack: the stack, started.
      path: the file by which `chat` finds it.
      progress: where to print.

    Raises:
      ProcessError: one of its processes ended.
    """
    state.publish(stack.router_url, path)
    try:
        progress.say(
            _HELP.format(
                router=stack.router_url,
                prefill=" ".join(stack.prefill_urls),
                decode=" ".join(stack.decode_urls),
                logs=stack.processes.log_dir,
            )
        )
        while True:
            stack.processes.check()
            time.sleep(_CHECK_SECONDS)
    finally:
        state.withdraw(path)


def main() -> int:
    """Runs the stack until Ctrl-C.

    Returns:
      The exit status: 0 after Ctrl-C, 1 after a failure.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", help="model to serve; default: the demo's own")
    parser.add_argument("--prefills", type=int, default=1, help="prefill servers")
    parser.add_argument("--decodes", type=int, default=1, help="decode servers")
    parser.add_argument("--router", choices=["rust", "mini-lb"], default="rust")
    parser.add_argument("--host", choices=LOOPBACKS, default=LOOPBACK, help="where to listen")
    args = parser.parse_args()
    exit_on_signals()
    progress = Progress()
    try:
        stack = Stack(
            args.model_path or default_model_path(),
            prefills=args.prefills,
            decodes=args.decodes,
            router=args.router,
            host=args.host,
            processes=Processes(progress=progress),
        )
        progress.say("Starting a prefill server, a decode server and the router.")
        with stack:
            serve(stack, state.state_path(), progress)
    except KeyboardInterrupt:
        progress.say("Stopped; every process has ended.")
    except (ProcessError, FileNotFoundError, ValueError) as error:
        progress.say(f"\n{error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
