#!/bin/sh
# A headless Chromium for tests/report/test_in_browser.py. Never fails: where none can be had, those tests are skipped, aloud.
for name in chromium-headless-shell chromium google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    echo "installing a headless Chromium (tests of the report's page), about 100 MB"
    log=$(mktemp)
    { apt-get -qq update && apt-get -qq -y -o DPkg::Lock::Timeout=120 --no-install-recommends install chromium-headless-shell ||
        apt-get -qq -y -o DPkg::Lock::Timeout=120 --no-install-recommends install chromium; } >"$log" 2>&1
    failed=$?
    [ "$failed" = 0 ] || tail -n 5 "$log"
    rm -f "$log"
    [ "$failed" = 0 ] && exit 0
fi
echo "NO BROWSER: the tests that open a report in one are skipped. Install chromium (Debian: apt-get install"
echo "chromium-headless-shell as root), or run: .venv/bin/playwright install chromium"
