#!/usr/bin/env bash
# Makes a machine ready for the tests: finds what they need, installs what is
# missing where it may (root, with Debian's packages), fetches Go modules and
# Kafka's jars into caches outside the checkout. Says exactly what is missing and
# exits 1 where it cannot. Quick when everything is there; safe to run again.
#
#   test/setup.sh          what "go test ./..." needs
#   test/setup.sh page     a browser too, for the tests of the status page
#   test/setup.sh deploy   promtool and systemd-analyze too, for the files of deploy/
#   test/setup.sh images   Docker's engine and compose too, for the image tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

missing=()  # what to tell a person
packages=() # the Debian packages that bring it

need() { # need WHAT PACKAGE: note something missing
	missing+=("$1")
	[ -z "$2" ] || packages+=("$2")
}

have() { command -v "$1" >/dev/null 2>&1; }

java_major() {
	local line
	line=$(java -version 2>&1 | grep -m1 version) || return 1
	line=${line#*\"}
	echo "${line%%[.\"-]*}"
}

has_postgres() {
	have postgres && have initdb && return
	compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

look() {
	missing=()
	packages=()
	have git || need "git" git
	have make || need "make" make
	have gcc || need "gcc (the race detector links with it)" gcc
	has_postgres || need "Postgres server programs, 15 or newer (initdb, postgres)" postgresql
	have pgbouncer || [ -x /usr/sbin/pgbouncer ] || need "pgbouncer (a connection pooler in front of Postgres)" pgbouncer
	if ! have java || [ "$(java_major || echo 0)" -lt 17 ]; then
		need "java, 17 or newer (Kafka's broker)" openjdk-17-jre-headless
	fi
	have kcat || need "kcat (librdkafka's client, a foreign producer)" kcat
	have mvn || need "mvn (fetches Kafka's jars)" maven
	if [ "${1:-}" = page ]; then
		have chromium || need "chromium (looks at the status page)" chromium
	fi
	if [ "${1:-}" = deploy ]; then
		have promtool || need "promtool (tests the alert rules)" prometheus
		have systemd-analyze || need "systemd-analyze (checks the units)" systemd
	fi
	if [ "${1:-}" = images ]; then
		have dockerd || need "dockerd (builds the images)" docker.io
		have docker-compose || docker compose version >/dev/null 2>&1 || need "docker-compose (checks docker-compose.yml)" docker-compose
	fi
}

install() {
	# Debian's package would make and start a cluster of its own; the tests have
	# theirs.
	if [[ " ${packages[*]} " == *" postgresql "* && ! -e /etc/postgresql-common/createcluster.conf ]]; then
		mkdir -p /etc/postgresql-common
		echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
	fi
	echo "setup: installing ${packages[*]}"
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -q >/dev/null || echo "setup: apt-get update had errors; going on with what it has" >&2
	apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
}

wanted=$(sed -n 's/^go //p' go.mod)
if ! have go; then
	echo "setup: go is missing: install Go $wanted or newer from go.dev and put it into PATH" >&2
	exit 1
fi
if ! go version >/dev/null; then # go.mod asks for a newer one that cannot be fetched
	echo "setup: go is older than $wanted, which go.mod asks for: install a newer one" >&2
	exit 1
fi

look "${1:-}"
if [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && have apt-get; then
	install
	look "${1:-}"
fi
if [ ${#missing[@]} -gt 0 ]; then
	echo "setup: missing:" >&2
	printf '  - %s\n' "${missing[@]}" >&2
	if [ ${#packages[@]} -gt 0 ]; then
		echo "setup: on Debian, as root: apt-get install ${packages[*]}" >&2
	fi
	exit 1
fi

[ "${1:-}" = images ] || {
	go mod download
	go run ./test/harness/cmd/prefetch
}
