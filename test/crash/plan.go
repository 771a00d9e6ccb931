package main

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"

	"holdfast/internal/crash"
)

// variant is one way to set a daemon up: what it promises, and so what the
// oracles hold it to. Each variant has a world of its own, with servers of its
// own, and runs beside the others.
type variant struct {
	daemon string // "pgsource" or "kafkasink", which is also the prefix of the places it passes
	name   string
	// settings are added to the daemon's configuration.
	settings map[string]string
	// progress: it keeps a progress table, so it passes the places of one.
	progress bool
	// durable: it acknowledges what a checkpoint holds.
	durable bool
	// peek: it reads and acknowledges over plain SQL.
	peek bool
	open func(context.Context, worldOptions) (world, error)
}

func (v *variant) String() string { return v.daemon + " " + v.name }

// variants are all that the matrix runs.
var variants = []*variant{
	{daemon: "pgsource", name: "effectively_once", progress: true, open: openBank, settings: map[string]string{"PGSOURCE_DELIVERY": "effectively_once"}},
	{daemon: "pgsource", name: "at_least_once", open: openBank, settings: map[string]string{"PGSOURCE_DELIVERY": "at_least_once"}},
	{
		daemon: "pgsource", name: "peek", progress: true, peek: true, open: openBank,
		settings: map[string]string{"PGSOURCE_DELIVERY": "effectively_once", "PGSOURCE_TRANSPORT": "peek"},
	},
	{
		daemon: "pgsource", name: "durable", progress: true, durable: true, open: openBank,
		// Each chunk of a copy waits for two checkpoints.
		settings: map[string]string{"PGSOURCE_DELIVERY": "effectively_once", "PGSOURCE_ACK_ON": "durable", "PGSOURCE_SNAPSHOT_CHUNK_BYTES": "8MiB"},
	},
	{daemon: "kafkasink", name: "effectively_once", progress: true, open: openCounters, settings: map[string]string{"KAFKASINK_DELIVERY": "effectively_once"}},
	{daemon: "kafkasink", name: "at_least_once", open: openCounters, settings: map[string]string{"KAFKASINK_DELIVERY": "at_least_once"}},
}

// progressPlaces are those of a progress table.
var progressPlaces = []crash.Point{
	crash.PgEpochNoted, crash.PgClaimSent, crash.PgClaimed, crash.PgBeforeProgress, crash.PgProgressSent, crash.PgProgressCompleted,
	crash.KafkaClaimSent, crash.KafkaClaimed, crash.KafkaBeforeProgress, crash.KafkaProgressSent, crash.KafkaProgressCompleted,
}

// passes tells whether the variant ever comes to a place.
func (v *variant) passes(p crash.Point) bool {
	return strings.HasPrefix(string(p), v.daemon+".") && (v.progress || !slices.Contains(progressPlaces, p))
}

// suffers tells whether a fault is of use with the variant. A kafkasink without
// a progress table cannot tell what a pipeline has lost; and durable differs
// from the others in what a pipeline comes back with alone, and takes its time
// over each run.
func (v *variant) suffers(f *fault) bool {
	switch {
	case v.durable:
		return f.everywhere || f.back
	case v.daemon == "kafkasink" && !v.progress:
		return !f.losing
	}
	return true
}

// crashCase is one run: a fault at a place.
type crashCase struct {
	variant *variant
	point   crash.Point
	fault   *fault
	// visit is which visit of the place it is.
	visit int
	// alive: the daemon is not killed.
	alive bool
	// by is what brings the daemon to the place, where a stream does not.
	by way
	// noted is what the daemon said when it did not come to the place.
	noted string
}

// way is how a pgsource comes to copy rows beside the stream.
type way string

const (
	byAddition way = "a table is added"
	byResync   way = "resync"
	byRepair   way = "verify -repair"
)

// waysTo gives the ways in which a daemon comes to a place; nil for the places
// that need none of them.
func waysTo(p crash.Point) []way {
	switch {
	case slices.Contains(crash.CopyPoints, p):
		return []way{byAddition, byResync, byRepair}
	case p == crash.PgRequestTaken:
		return []way{byResync, byRepair}
	case slices.Contains(crash.ResyncPoints, p):
		return []way{byResync}
	}
	return nil
}

func (c crashCase) name() string {
	at, how := string(c.point), c.fault.name
	if c.by != "" {
		at += fmt.Sprintf(" (%s)", c.by)
	}
	if c.alive {
		how += ", the daemon goes on"
	}
	return fmt.Sprintf("%s at %s, %s", c.variant, at, how)
}

// plan gives the runs of the matrix: every fault at every place once, the
// variants in turn, so that every variant comes to every place and suffers
// every fault too; and SIGKILL at every place in every variant. Where a fault can
// meet a daemon that goes on, it does in every second run of it in a variant. The
// same seed gives the same runs.
func plan(seed uint64, points, faultNames []string) []crashCase {
	var cases []crashCase
	add := func(v *variant, p crash.Point, f *fault, by way, alive bool) {
		c := crashCase{variant: v, point: p, fault: f, visit: 1, by: by, alive: alive}
		c.visit += c.random(seed).IntN(c.visits())
		cases = append(cases, c)
	}
	led := int(seed % 7) // counts the runs that a way leads to
	// met counts how often a variant has suffered a fault, and come to a place;
	// the one with the least is next.
	met := map[string]int{}
	turn := int(seed % 97)
	for _, p := range crash.Points {
		for i := range faults {
			f := &faults[i]
			able := able(p, f)
			if len(able) == 0 {
				continue
			}
			turn++
			next := able[turn%len(able)]
			for _, v := range able {
				byFault, byPlace := f.name+v.String(), string(p)+v.String()
				best := cmp.Or(cmp.Compare(met[byFault], met[f.name+next.String()]), cmp.Compare(met[byPlace], met[string(p)+next.String()]))
				if best < 0 {
					next = v
				}
			}
			for _, v := range able {
				if !f.everywhere && v != next {
					continue
				}
				byFault := f.name + v.String()
				met[byFault]++
				met[string(p)+v.String()]++
				var by way
				if ways := waysTo(p); ways != nil {
					led++
					by = ways[led%len(ways)]
				}
				if matches(string(p), points) && matches(f.name, faultNames) {
					alive := f.both && (met[byFault]+int(seed%2))%2 == 0
					add(v, p, f, by, alive)
				}
			}
		}
	}
	return cases
}

// able gives the variants that come to a place and suffer a fault.
func able(p crash.Point, f *fault) (out []*variant) {
	if f.request != "" && slices.Contains(lastPlaces, p) {
		return nil // a daemon that ends may have no more requests
	}
	for _, v := range variants {
		if v.passes(p) && v.suffers(f) {
			out = append(out, v)
		}
	}
	return out
}

// random gives the randomness of a run, which does not depend on the runs
// before it.
func (c crashCase) random(seed uint64) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(c.name()))
	return rand.New(rand.NewPCG(seed, h.Sum64()))
}

// uncovered gives the pairs of place, fault and variant that could meet and do
// not in the given runs.
func uncovered(cases []crashCase) (missing []string) {
	met := map[[2]string]bool{}
	for _, c := range cases {
		met[[2]string{string(c.point), c.fault.name}] = true
		met[[2]string{string(c.point), c.variant.String()}] = true
		met[[2]string{c.fault.name, c.variant.String()}] = true
	}
	for _, p := range crash.Points {
		for i := range faults {
			f := &faults[i]
			for _, v := range able(p, f) {
				for _, pair := range [][2]string{{string(p), f.name}, {string(p), v.String()}, {f.name, v.String()}} {
					if !met[pair] {
						missing = append(missing, pair[0]+" × "+pair[1])
					}
				}
			}
		}
	}
	slices.Sort(missing)
	return slices.Compact(missing)
}

// visits gives how many visits of its place the daemon makes at least.
func (c *crashCase) visits() int {
	switch {
	case slices.Contains(crash.CopyPoints, c.point):
		if c.by == byRepair || c.variant.durable { // one chunk
			return 1
		}
		return 3
	case often(c.point):
		return 6
	}
	return 1
}

// often tells whether a steady stream passes the place again and again, so
// that a later visit than the first is worth a try.
func often(p crash.Point) bool {
	if waysTo(p) != nil {
		return false
	}
	switch p {
	case crash.PgEpochNoted, crash.PgClaimSent, crash.PgClaimed, crash.KafkaClaimSent, crash.KafkaClaimed, crash.PgShutdown, crash.PgShutdownLastWord, crash.PgReconnect,
		crash.KafkaShutdown, crash.KafkaRevoke, crash.KafkaLost, crash.KafkaDrain, crash.KafkaBeforeDLQ, crash.KafkaAfterDLQ:
		return false
	}
	return true
}

func matches(name string, only []string) bool {
	return only == nil || slices.ContainsFunc(only, func(part string) bool { return strings.Contains(name, part) })
}
