# Everything that is done to this repository. "make help" lists it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What is slow to make and the same for every checkout is kept outside of it.
CACHE := $(or $(HOLDFAST_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/holdfast)
TOOLS := $(CACHE)/tools-$(shell { go env GOVERSION; cat tools/go.mod; } 2>/dev/null | sha256sum | cut -c1-12)

# A result from a cache is no test that ran.
GO_TEST := go test -count=1 -timeout 45m
# How long "make fuzz" gives to each fuzz target.
FUZZTIME ?= 10s
# Where "make dist" puts the binaries, and for which architectures it makes them.
DIST ?= dist
ARCHS ?= amd64 arm64

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 20

.PHONY: build
build: ## compile everything
	go build ./...

.PHONY: setup
setup: ## find, install or name what the tests need
	@test/setup.sh

.PHONY: test
test: setup ## everything that must pass before a change lands
	go vet ./...
	$(MAKE) --no-print-directory test-unit test-integration test-page test-deploy test-images

.PHONY: test-unit
test-unit: ## the packages without servers, with the race detector
	$(GO_TEST) -race ./internal/... ./cmd/...

# One package at a time: each starts servers of its own, and two cores are soon
# busy enough to turn a wait into a time-out. The end-to-end tests say in the
# log which positions they read back from the servers.
.PHONY: test-integration
test-integration: setup ## against real Postgres, real Kafka and the simulator of Feldera
	$(GO_TEST) -p 1 $$(go list ./test/... | grep -v -e /test/images -e /test/page -e /test/deploy -e /test/e2e)
	$(GO_TEST) -v ./test/e2e

.PHONY: test-page
test-page: ## the status page, in a real browser
	test/setup.sh page
	$(GO_TEST) ./test/page

.PHONY: test-deploy
test-deploy: ## the files under deploy/: manifests, units, alerts, dashboard
	test/setup.sh deploy
	$(GO_TEST) ./test/deploy

.PHONY: test-images
test-images: ## docker-compose.yml and both images, on a private Docker engine
	test/setup.sh images
	$(GO_TEST) ./test/images

.PHONY: test-images-compiled
test-images-compiled: ## the stage of the Dockerfile that compiles, with this machine's Go (takes minutes)
	test/setup.sh images
	$(GO_TEST) -tags compiled -run TestCompiledStage ./test/images

.PHONY: verify
verify: setup ## pgsource verify under traffic: RUNS (20) comparisons of ROWS (100000) rows without a false alarm, then planted faults
	VERIFY_RUNS=$(or $(RUNS),20) VERIFY_ROWS=$(or $(ROWS),100000) $(GO_TEST) -v -run 'TestPgsourceVerify$$' ./test/e2e

.PHONY: postgres-matrix
postgres-matrix: setup ## the tests of pgsource on PostgreSQL 14 to 18 (RUN=pattern), with programs from npm
	test/postgres-matrix.sh

.PHONY: race
race: setup ## every test with the race detector
	go test -timeout 20m -race -p 1 ./...

$(TOOLS)/golangci-lint: tools/go.mod tools/go.sum
	@echo "installing the linters of tools/go.mod; the first time takes some minutes"
	cd tools && GOBIN="$(TOOLS)" go install tool
	@touch "$@"

.PHONY: lint
lint: $(TOOLS)/golangci-lint ## the linters of .golangci.yml, and scripts that do not parse
	for script in test/setup.sh test/postgres-matrix.sh test/newcomer.sh .ci/run; do bash -n "$$script"; done
	"$(TOOLS)/golangci-lint" run ./...

.PHONY: fmt
fmt: $(TOOLS)/golangci-lint ## format with gofumpt and sort imports
	"$(TOOLS)/golangci-lint" fmt ./...

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (10s)
	@for pkg in $$(go list ./...); do \
		for target in $$(go test -list '^Fuzz' "$$pkg" | grep '^Fuzz' || true); do \
			echo "$$pkg $$target"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$pkg"; \
		done; \
	done

.PHONY: bench
bench: setup ## measure both daemons against the simulator
	go run ./test/bench

.PHONY: contract
contract: ## Feldera's contract, on the simulator, or with FELDERA_URL=… FELDERA_PIPELINE=… on a real pipeline
	@go run ./test/contract

.PHONY: contract-sql
contract-sql: ## the SQL program that a pipeline under "make contract" must run
	@go run ./test/contract -sql

.PHONY: crash
crash: setup ## the crash matrix: every fault at every place (SEED=…, POINTS=…, FAULTS=…, VARIANTS=…)
	go run ./test/crash $(if $(SEED),-seed $(SEED)) $(if $(POINTS),-points '$(POINTS)') $(if $(FAULTS),-faults '$(FAULTS)') $(if $(VARIANTS),-variants '$(VARIANTS)')

.PHONY: sabotage
sabotage: setup ## builds with one rule broken in each, all of which must be found out (ONLY=part of a name, SEED=…)
	go run ./test/crash -sabotage $(if $(SEED),-seed $(SEED)) $(if $(ONLY),-only '$(ONLY)')

.PHONY: soak
soak: setup ## random faults on both daemons for MINUTES (5), from a printed SEED
	go run ./test/crash -soak $(or $(MINUTES),5)m $(if $(SEED),-seed $(SEED))

.PHONY: retention
retention: setup ## an idle publication while much WAL is written elsewhere (RETENTION_MB=1024): what the slot holds back
	RETENTION_MB=$(or $(RETENTION_MB),1024) $(GO_TEST) -v -run '^TestPgsourceRetainedWAL$$' ./test/e2e

.PHONY: newcomer
newcomer: setup ## a newcomer's path: a clean clone, the demo, wrong settings mended by what is said
	test/newcomer.sh

.PHONY: replay
replay: setup ## record traffic and play it twice (DIR=folder with PGSOURCE_… and KAFKASINK_… set: yours)
	go run ./test/replay $(if $(DIR),-dir '$(DIR)') $(if $(VERB),$(VERB))

.PHONY: snapshot
snapshot: setup ## copies of existing rows under load and SIGKILL: SEEDS (20) from SEED (1), ROWS (200000), KILLS (6)
	$(GO_TEST) -v -timeout 4h -tags snapshotload ./test/snapshot -run TestSnapshotUnderLoad -args \
		-seeds $(or $(SEEDS),20) -seed $(or $(SEED),1) -rows $(or $(ROWS),200000) -kills $(or $(KILLS),6)

.PHONY: snapshot-bench
snapshot-bench: setup ## a copy of ROWS (5000000) rows: memory, rows per second, and what it does to the stream's latency
	$(GO_TEST) -v -timeout 2h -tags snapshotload ./test/snapshot -run TestSnapshotCosts -args -bench-rows $(or $(ROWS),5000000)

.PHONY: demo
demo: setup ## start everything on this machine and show it at work (DEMO_KEEP=1: stay up)
	go run ./test/demo

.PHONY: dist
dist: ## static Linux binaries of both daemons for ARCHS (amd64 arm64) in DIST (dist)
	for arch in $(ARCHS); do \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch go build -trimpath -buildvcs=auto -o "$(DIST)/linux-$$arch/" ./cmd/pgsource ./cmd/kafkasink; \
	done
	cd "$(DIST)" && sha256sum linux-*/* >SHA256SUMS

.PHONY: images
images: ## both images, compiled inside a running Docker engine that reaches a registry
	for name in pgsource kafkasink; do \
		DOCKER_BUILDKIT=1 docker build --target $$name --tag holdfast/$$name .; \
	done

.PHONY: clean
clean: ## remove what was built here (the caches stay)
	rm -rf "$(DIST)"
