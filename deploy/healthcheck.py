"""Exit code 0 while the server has a model in memory, 1 otherwise: the container's health check.

It asks FLASHMOE_HEALTH_URL, or port 8000 of this machine, with FLASHMOE_API_KEY where one is set.
"""

import os
import sys
import urllib.request


def main() -> int:
    url = os.environ.get("FLASHMOE_HEALTH_URL", "http://127.0.0.1:8000/health")
    key = os.environ.get("FLASHMOE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # no proxy: it is this machine
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=8) as answer:
            print(answer.read(4096).decode("utf-8", "replace"))
    except (OSError, ValueError) as error:  # an HTTP status of 503 is an OSError too
        print(f"{url}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
