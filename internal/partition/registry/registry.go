// Package registry finds the Avro schemas that records name: in files that the
// operator gives, or in a schema registry over HTTP.
//
// It promises that looking a schema up never blocks the caller; that one
// schema is asked for once at a time, however many partitions wait for it; that
// a registry which is away, refuses this user, or answers nonsense says nothing
// about a record: whoever asks waits, and it is tried again until it works;
// that "there is no such schema" is believed only from the registry itself,
// only after it has said so for a while, and not for long; and that what it
// keeps and what it reads is bounded.
//
// It does not ask for "the latest" schema of anything: what a record was
// written with is what it names.
//
// Its caller is cmd/kafkasink, which hands it to the decoders as their
// decode.Schemas. It is I/O, so it cannot be a part of internal/decode; and it
// is about records of Kafka, so it stands below internal/partition.
package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"

	"holdfast/internal/decode"
)

const (
	defaultTimeout  = 5 * time.Second
	defaultPatience = 30 * time.Second
	defaultBelieve  = 30 * time.Second
	defaultKept     = 1024
	// maxFetches bounds the schemas that are asked for at the same time.
	maxFetches = 8
	// shortestRetry and longestRetry bound the time between two attempts for
	// one schema.
	shortestRetry = 200 * time.Millisecond
	longestRetry  = 15 * time.Second
	// forgotten is how long after it was last looked up a schema is still
	// asked for: whoever wanted it may have given up its partition.
	forgotten = 2 * time.Minute
)

// Config says where schemas come from. Zero values are replaced by the
// defaults named here.
type Config struct {
	// URL of the registry, "" for none: then only Files are known.
	URL string
	TLS *tls.Config // nil = the system's roots
	// User and Password are for basic authentication, Token for a bearer's.
	// They are asked for with each attempt, so that a rotated secret is found.
	User     string
	Password func() (string, error)
	Token    func() (string, error)
	// Timeout of one request (5s).
	Timeout time.Duration
	// Patience is how long the registry must go on saying that there is no such
	// schema before that is believed (30s): a new schema takes a while to reach
	// every node. Believe is how long it is believed then (30s).
	Patience, Believe time.Duration
	// Kept is how many schemas are kept, those aside that came from files
	// (1024).
	Kept int
	// Files are schemas that are known without asking.
	Files []File
	// OnAttempt is told how each attempt ended; err is nil for one that ended
	// with a schema, or with the certainty that there is none. It may be nil.
	OnAttempt func(what string, err error)
}

// File is a schema that the operator gives.
type File struct {
	// Ref is the name by which records know it; the zero value for its
	// fingerprint, by which every file is known.
	Ref    decode.SchemaRef
	Schema *decode.AvroSchema
}

// Registry finds schemas. It is safe for concurrent use.
type Registry struct {
	cfg   Config
	http  *http.Client
	fixed map[decode.SchemaRef]*decode.AvroSchema
	wake  chan struct{}

	mu      sync.Mutex
	known   map[decode.SchemaRef]*entry
	order   []decode.SchemaRef // of what is settled, the one used longest ago first
	waiting []decode.SchemaRef // to be asked for
}

// entry is what is known of one schema.
type entry struct {
	schema *decode.AvroSchema
	// refused is why there is none, and is believed until then.
	refused *decode.Refusal
	until   time.Time
	// ready is closed when an attempt has ended; nil when nothing is asked for.
	ready chan struct{}
	why   error     // of the last attempt
	asked time.Time // when it was last looked up
	// missing is since when the registry says that there is no such schema.
	missing time.Time
}

// New makes a Registry. Nothing is asked for before Run.
func New(cfg Config) *Registry {
	set := func(v *time.Duration, otherwise time.Duration) {
		if *v == 0 {
			*v = otherwise
		}
	}
	set(&cfg.Timeout, defaultTimeout)
	set(&cfg.Patience, defaultPatience)
	set(&cfg.Believe, defaultBelieve)
	if cfg.Kept == 0 {
		cfg.Kept = defaultKept
	}
	cfg.URL = strings.TrimRight(cfg.URL, "/")
	r := &Registry{
		cfg: cfg, wake: make(chan struct{}, 1), known: make(map[decode.SchemaRef]*entry),
		fixed: make(map[decode.SchemaRef]*decode.AvroSchema),
		http: &http.Client{Timeout: cfg.Timeout, Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, TLSClientConfig: cfg.TLS, MaxConnsPerHost: maxFetches, IdleConnTimeout: time.Minute,
			TLSHandshakeTimeout: cfg.Timeout, ResponseHeaderTimeout: cfg.Timeout,
		}},
	}
	for _, f := range cfg.Files {
		if f.Ref != (decode.SchemaRef{}) {
			r.fixed[f.Ref] = f.Schema
		}
		r.fixed[decode.SchemaRef{Kind: decode.SchemaFingerprint, Fingerprint: f.Schema.Fingerprint()}] = f.Schema
	}
	return r
}

// Find gives the schema that ref names, if it is here. Otherwise it has it
// asked for and gives a *decode.PendingError, or a *decode.Refusal where it is
// certain that there is none.
func (r *Registry) Find(ref decode.SchemaRef) (*decode.AvroSchema, error) {
	if s := r.fixed[ref]; s != nil {
		return s, nil
	}
	switch {
	case ref.Kind == decode.SchemaFingerprint:
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, Why: fmt.Sprintf("it was written with %s, which none of the schema files has", ref),
			Do: "add the file with that schema to KAFKASINK_SCHEMA_FILES",
		}
	case r.cfg.URL == "":
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, Why: fmt.Sprintf("it was written with %s, which none of the schema files has, and no registry is set", ref),
			Do: "set KAFKASINK_REGISTRY_URL, or add the schema to KAFKASINK_SCHEMA_FILES",
		}
	}
	if ref.Kind == decode.SchemaID && ref.ID > math.MaxInt32 {
		// Registries give ids from 1 to 2^31-1. To be asked for another one they
		// answer with a 404 that does not say "no such schema", which would hold
		// the partition for ever.
		return nil, &decode.Refusal{
			Reason: decode.ReasonMalformed, Why: fmt.Sprintf("it says that it was written with %s, and no registry gives such an id", ref), Expected: "an id of at most 2147483647",
			Do: "look at what writes to the topic; if its Avro has no frame, give its schema with KAFKASINK_AVRO_SCHEMAS",
		}
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.known[ref]
	switch {
	case e == nil:
		e = &entry{}
		r.known[ref] = e
	case e.schema != nil:
		r.touch(ref)
		return e.schema, nil
	case e.refused != nil && now.Before(e.until):
		return nil, e.refused
	}
	e.asked = now
	if e.ready == nil {
		r.forget(ref)
		e.ready, e.refused = make(chan struct{}), nil
		r.waiting = append(r.waiting, ref)
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
	return nil, &decode.PendingError{What: ref.String(), Why: e.why, Ready: e.ready}
}

// Check makes one request to the registry and tells what is wrong with it, nil
// for nothing. It needs no right but to be let in.
func (r *Registry) Check(ctx context.Context) error {
	if r.cfg.URL == "" {
		return nil
	}
	a := r.attempt(ctx)
	if err := a.authorize(); err != nil {
		return err
	}
	_, err := a.get("/schemas/types")
	if err = a.explain(err); err != nil && (a.status == 0 || a.status == http.StatusUnauthorized || a.status == http.StatusForbidden || a.status >= http.StatusInternalServerError) {
		return err
	}
	return nil // older registries do not know the question, and answer
}

// touch makes ref the one used last. It is linear in the number of schemas,
// which is small, and does nothing for the schema that is used all the time.
func (r *Registry) touch(ref decode.SchemaRef) {
	if n := len(r.order); n > 0 && r.order[n-1] == ref {
		return
	}
	r.forget(ref)
	r.order = append(r.order, ref)
}

// forget takes ref out of the order of what is settled.
func (r *Registry) forget(ref decode.SchemaRef) {
	for i := range r.order {
		if r.order[i] == ref {
			r.order = append(r.order[:i], r.order[i+1:]...)
			return
		}
	}
}

// Run asks for schemas until ctx ends, and waits for what it began.
func (r *Registry) Run(ctx context.Context) {
	defer r.http.CloseIdleConnections()
	var fetches sync.WaitGroup
	defer fetches.Wait()
	slots := make(chan struct{}, maxFetches)
	for {
		r.mu.Lock()
		refs := r.waiting
		r.waiting = nil
		r.mu.Unlock()
		for _, ref := range refs {
			fetches.Go(func() { r.fetch(ctx, ref, slots) })
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return
		}
	}
}

// fetch asks for one schema until there is an answer.
func (r *Registry) fetch(ctx context.Context, ref decode.SchemaRef, slots chan struct{}) {
	again := backoff.NewExponentialBackOff(backoff.WithInitialInterval(shortestRetry), backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(0.5), backoff.WithMaxInterval(longestRetry), backoff.WithMaxElapsedTime(0))
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			r.settle(ref, nil, nil, ctx.Err())
			return
		}
		schema, err := r.ask(ctx, ref)
		<-slots
		if ctx.Err() != nil {
			r.settle(ref, nil, nil, ctx.Err())
			return
		}
		if r.answered(ref, schema, err) {
			return
		}
		timer := time.NewTimer(again.NextBackOff())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			r.settle(ref, nil, nil, ctx.Err())
			return
		}
	}
}

// answered takes in how an attempt ended, and tells whether it was the last.
func (r *Registry) answered(ref decode.SchemaRef, schema *decode.AvroSchema, err error) bool {
	var refused *decode.Refusal
	certain := err == nil || errors.As(err, &refused)
	missing := errors.Is(err, errNotFound)
	if r.cfg.OnAttempt != nil {
		told := err
		if certain {
			told = nil
		}
		r.cfg.OnAttempt(ref.String(), told)
	}
	if certain {
		r.settle(ref, schema, refused, nil)
		return true
	}
	now := time.Now()
	r.mu.Lock()
	e := r.known[ref]
	switch {
	case !missing:
		e.missing = time.Time{}
	case e.missing.IsZero():
		e.missing = now
	}
	since, asked := e.missing, e.asked
	r.mu.Unlock()
	switch {
	case missing && now.Sub(since) >= r.cfg.Patience:
		r.settle(ref, nil, &decode.Refusal{
			Reason: decode.ReasonSchema, Why: fmt.Sprintf("it was written with %s, and the registry has said for %v that there is none", ref, now.Sub(since).Round(time.Second)),
			Expected: "a schema of this registry",
			Do:       "check KAFKASINK_REGISTRY_URL and the producer's registry; register the schema again under its old id, or add it to KAFKASINK_SCHEMA_FILES" + hintOf(ref),
		}, nil)
		return true
	case now.Sub(asked) > forgotten:
		r.settle(ref, nil, nil, err)
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// Those who wait look again and find why; nothing is asked for twice.
	e.why = err
	close(e.ready)
	e.ready = make(chan struct{})
	return false
}

// hintOf guesses what an id that nobody knows is.
func hintOf(ref decode.SchemaRef) string {
	if ref.Kind == decode.SchemaID && ref.ID == 0 {
		return "; an id of 0 may be the first half of one of 8 bytes, which is not supported: have the serializer write 4"
	}
	return ""
}

// settle ends the asking for a schema. Without a schema and without a refusal
// it is forgotten, and asked for anew when it is looked up again.
func (r *Registry) settle(ref decode.SchemaRef, schema *decode.AvroSchema, refused *decode.Refusal, why error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.known[ref]
	e.schema, e.refused, e.why = schema, refused, why
	if refused != nil {
		e.until = time.Now().Add(r.cfg.Believe)
	}
	close(e.ready)
	e.ready, e.missing = nil, time.Time{}
	if schema == nil && refused == nil {
		delete(r.known, ref)
		return
	}
	for len(r.order) >= r.cfg.Kept {
		delete(r.known, r.order[0])
		r.order = r.order[1:]
	}
	r.order = append(r.order, ref)
}
