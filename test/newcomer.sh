#!/usr/bin/env bash
# The path of somebody who has just found this: a clean clone, the demo, a first
# start, the page, a row; and one wrong setting of each family, mended by nothing
# but what the program says. What a message does not give, this script does not
# know: so it fails where a message does not suffice.
#
#   test/newcomer.sh            a clone, make demo, and the path below
#   test/newcomer.sh --test     make test in the clone, too (long)
#   test/newcomer.sh --fast     the path alone, on this checkout
#
# NEWCOMER_BIN names a folder with both daemons, instead of building them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clone=yes tests=no
for arg in "$@"; do
	case $arg in
	--fast) clone=no ;;
	--test) tests=yes ;;
	*)
		sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2
		exit 64
		;;
	esac
done

work=$(mktemp -d)
stand= daemon=
finish() {
	[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
	# The stand ends with its input.
	exec 8>&- || true
	[ -z "$stand" ] || wait "$stand" || true
	rm -rf "$work"
}
trap finish EXIT
say() { printf 'newcomer: %s\n' "$*"; }
fail() {
	printf 'newcomer: FAILED: %s\n' "$*" >&2
	exit 1
}

if [ $clone = yes ]; then
	say "a clean clone"
	git clone --quiet . "$work/holdfast"
	cd "$work/holdfast"
	say "make demo"
	make demo
	[ $tests = no ] || make test
fi

bin=${NEWCOMER_BIN:-$work/bin}
[ -n "${NEWCOMER_BIN:-}" ] || go build -o "$work/bin/" ./cmd/pgsource ./cmd/kafkasink
go build -o "$work/stand" ./test/newcomer
mkfifo "$work/input"
"$work/stand" <"$work/input" >"$work/addresses" &
stand=$!
exec 8>"$work/input"
until grep -q '^READY$' "$work/addresses"; do
	kill -0 "$stand" 2>/dev/null || fail "the stand does not start"
	read -rt 0.1 <> <(:) || true
done
# shellcheck disable=SC1090,SC1091
. <(grep -v READY "$work/addresses")

# words RE: the groups of the first line of the output that fits, one a line.
words() {
	[[ $out =~ $1 ]] || return 1
	found=("${BASH_REMATCH[@]:1}")
}

run_daemon() { # run_daemon VERB…: sets out and code
	code=0
	out=$("$bin/$program" "$@" 2>&1) || code=$?
}

# do_it runs a command that the program named; what it says when it refuses is
# to be mended as well.
do_it() {
	say "    does: $last"
	PATH="$bin:$PATH" bash -c "$last" >"$work/done" 2>&1 || { out=$(cat "$work/done") && mend; }
}

# mend takes from the output what to do, and does it. Its rules are about how
# the program speaks, and about no setting.
mend() {
	local nl=$'\n' name value
	if words '([A-Z_]+) is unknown; did you mean ([A-Z_]+)\?'; then
		name=${found[1]}
		value=${!found[0]}
		unset "${found[0]}"
	elif words '([A-Z_]+) does not begin with ([a-z:/]+)'; then
		name=${found[0]}
		value=${found[1]}${!name}
	elif words '([A-Z_]+) [^;'"$nl"']*; allowed: [^'"$nl"']*such as ([^, '"$nl"']+)'; then
		name=${found[0]} value=${found[1]}
	elif words '([A-Z_]+) [^;'"$nl"']*; allowed: a whole number from ([0-9]+)'; then
		name=${found[0]} value=${found[1]}
	elif words '([A-Z_]+) [^;'"$nl"']*; allowed: ([a-z_]+)(, | or )'; then
		name=${found[0]} value=${found[1]}
	elif words 'table "([^"]+)"[^'"$nl"']*perhaps ([a-z_]+)'"$nl"'[^'"$nl"']*correct the name in [A-Z_ or]*('"${program^^}"'_[A-Z]+)'; then
		name=${found[2]}
		value=${!name/=${found[0]}:/=${found[1]}:}
	elif words 'fix: [^'"$nl"']*set ([A-Z_]+)=([^, '"$nl"']+)'; then
		name=${found[0]} value=${found[1]}
	elif words 'fix: [^:'"$nl"']*run: ((pgsource|mkdir) [^)'"$nl"']*)'; then
		last=${found[0]}
		do_it
		return
	elif words 'repeat it with (-[a-z]+)'; then
		last="$last ${found[0]}"
		do_it
		return
	elif words 'fix: [^'"$nl"']*((ALTER|CREATE|GRANT|SELECT) [^;'"$nl"']*)'; then
		say "    runs in Postgres: ${found[0]}"
		psql -qX "$STAND_DSN" -v ON_ERROR_STOP=1 -c "${found[0]}" >/dev/null
		return
	elif [[ $out == *'timeout: '* || $out == *'did not answer in time'* ]]; then
		say "    looks again: a server is late"
		return
	else
		return 1
	fi
	say "    sets: $name=$value"
	export "$name=$value"
}

# mended WHAT PROGRAM [NAME=VALUE…]: with these settings the program does not
# work, and says what makes it work.
cases=0
mended() {
	say "$1"
	(
		program=$2
		shift 2
		for setting; do export "${setting?}"; done
		run_daemon check
		[ $code -ne 0 ] || fail "it works although it should not: $out"
		for _ in 1 2 3 4 5 6 7 8; do
			mend || fail "the message does not suffice:"$'\n'"$out"
			run_daemon check
			[ $code -ne 0 ] || exit 0
		done
		fail "it does not work after all that it said:"$'\n'"$out"
	) || exit 1
	cases=$((cases + 1))
}

say "pgsource, from nothing"
export PGSOURCE_DSN=$STAND_DSN PGSOURCE_TABLES=public.orders FELDERA_URL=$STAND_FELDERA FELDERA_PIPELINE=shop PGSOURCE_STATE=file:$work/pgsource.json PGSOURCE_LISTEN=127.0.0.1:0
export KAFKASINK_BROKERS=$STAND_BROKER KAFKASINK_TOPICS=payments=payments:json KAFKASINK_LISTEN=127.0.0.1:0
mended "  no pipeline, no publication, no slot" pgsource
export PGSOURCE_CREATE=true # what it said

mended "a misspelt name" pgsource PGSOURCE_BATCH_ROW=500
mended "an address without its scheme" pgsource "FELDERA_URL=${STAND_FELDERA#http://}"
mended "a role that may not replicate" pgsource "PGSOURCE_DSN=$STAND_PLAIN_DSN" PGSOURCE_CREATE=
mended "a duration without a unit" pgsource PGSOURCE_BATCH_AGE=5
mended "a size without a unit" pgsource PGSOURCE_MEMORY_LIMIT=64
mended "a number that is none" pgsource PGSOURCE_BATCH_ROWS=many
mended "a policy that there is not" pgsource PGSOURCE_TRUNCATE=maybe
mended "a table that neither side has been told of" pgsource PGSOURCE_TABLES=public.orders,public.visits
mended "a state in a folder that is not there" pgsource "PGSOURCE_STATE=file:$work/state/pgsource.json"
mended "a log level that there is not" pgsource PGSOURCE_LOG_LEVEL=loud

export FELDERA_URL=$STAND_FELDERA_TOPICS
mended "a misspelt table" kafkasink KAFKASINK_TOPICS=payments=paymints:json
mended "a misspelt name" kafkasink KAFKASINK_GRUOP=x
mended "a protocol that there is not" kafkasink KAFKASINK_GROUP_PROTOCOL=modern
mended "a time-out without a unit" kafkasink KAFKASINK_SESSION_TIMEOUT=45
mended "a policy for bad records that there is not" kafkasink KAFKASINK_POISON=ignore

say "pgsource runs, a row, and the page"
export FELDERA_URL=$STAND_FELDERA
"$bin/pgsource" >"$work/log" 2>&1 8>&- &
daemon=$!
# eventually WHAT COMMAND…: within half a minute
eventually() {
	local what=$1 end=$((SECONDS + 30))
	shift
	until "$@" >"$work/seen" 2>&1; do
		kill -0 "$daemon" 2>/dev/null || fail "pgsource has ended: $(tail -3 "$work/log")"
		[ $SECONDS -lt $end ] || fail "$what: $(tail -3 "$work/seen")"
		read -rt 0.1 <> <(:) || true
	done
}
eventually "it says where it listens" grep -q 'msg=starting' "$work/log"
page=http://$(sed -n 's/.*msg=starting.* listen=\([0-9.:]*\).*/\1/p' "$work/log")
eventually "it is ready" curl -sf "$page/readyz"
psql -qX "$STAND_DSN" -c "INSERT INTO orders VALUES (1, 'newcomer')"
row() {
	curl -sSG "$FELDERA_URL/v0/pipelines/shop/query" -d format=text --data-urlencode 'sql=SELECT * FROM orders' | tee "$work/rows" | grep -q newcomer
}
eventually "the row is in the pipeline" row
curl -sf "$page/" | grep -q '<title>.*pgsource' || fail "the page does not say what it is the page of"
kill "$daemon"
wait "$daemon" || fail "pgsource ended with code $? after SIGTERM"
daemon=
say "done: $cases wrong setups were mended by what the program said"
