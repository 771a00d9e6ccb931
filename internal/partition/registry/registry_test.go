package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/internal/decode"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const orderSchema = `{"type":"record","name":"order","fields":[{"name":"id","type":"long"}]}`

// patience bounds each wait for something that must happen.
const patience = 30 * time.Second

// fake is a schema registry with faults.
type fake struct {
	*httptest.Server
	mu       sync.Mutex
	answers  map[string]answer // by path
	requests map[string]int
	auth     string        // the Authorization of the last request
	hold     chan struct{} // requests wait for it, nil for none
}

type answer struct {
	status int
	body   string
}

func found(schema string, references ...map[string]any) answer {
	body, err := json.Marshal(map[string]any{"schema": schema, "references": references, "id": 7, "version": 1})
	if err != nil {
		panic(err)
	}
	return answer{http.StatusOK, string(body)}
}

var noSchema = answer{http.StatusNotFound, `{"error_code":40403,"message":"Schema not found"}`}

func newFake(t *testing.T, start func(http.Handler) *httptest.Server) *fake {
	t.Helper()
	f := &fake{answers: make(map[string]answer), requests: make(map[string]int)}
	f.Server = start(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		f.mu.Lock()
		f.requests[req.URL.Path]++
		f.auth = req.Header.Get("Authorization")
		a, ok := f.answers[req.URL.Path]
		hold := f.hold
		f.mu.Unlock()
		if hold != nil {
			select {
			case <-hold:
			case <-req.Context().Done():
				return
			}
		}
		if !ok {
			a = noSchema
		}
		w.WriteHeader(a.status)
		_, _ = w.Write([]byte(a.body))
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fake) set(path string, a answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[path] = a
}

func (f *fake) asked(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests[path]
}

// newRegistry runs a Registry for the length of a test.
func newRegistry(t *testing.T, url string, change func(*Config)) *Registry {
	t.Helper()
	cfg := Config{URL: url}
	if change != nil {
		change(&cfg)
	}
	r := New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return r
}

func id(n uint32) decode.SchemaRef { return decode.SchemaRef{Kind: decode.SchemaID, ID: n} }

// find looks a schema up as a sender does: whenever there is news. It gives
// the reasons for which it waited.
func find(t *testing.T, r *Registry, ref decode.SchemaRef, until func(*decode.PendingError) bool) (*decode.AvroSchema, error) {
	t.Helper()
	limit := time.After(patience)
	for {
		s, err := r.Find(ref)
		var pending *decode.PendingError
		if !errors.As(err, &pending) || (until != nil && until(pending)) {
			return s, err
		}
		select {
		case <-pending.Ready:
		case <-limit:
			t.Fatalf("%v after %v: %v", ref, patience, err)
		}
	}
}

func plainHTTP(h http.Handler) *httptest.Server { return httptest.NewServer(h) }

func TestOneRequestForMany(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	f.hold = make(chan struct{})
	f.set("/schemas/ids/7", found(orderSchema))
	r := newRegistry(t, f.URL+"/", nil)
	var first *decode.PendingError
	if _, err := r.Find(id(7)); !errors.As(err, &first) || first.Why != nil {
		t.Fatalf("error %v", err)
	}
	for range 100 {
		var again *decode.PendingError
		if _, err := r.Find(id(7)); !errors.As(err, &again) || again.Ready != first.Ready {
			t.Fatalf("error %v", err)
		}
	}
	close(f.hold)
	s, err := find(t, r, id(7), nil)
	if err != nil || s == nil {
		t.Fatalf("%v, %v", s, err)
	}
	if again, err := r.Find(id(7)); again != s || err != nil {
		t.Fatalf("another one: %v", err)
	}
	if n := f.asked("/schemas/ids/7"); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// Nothing that is wrong with the registry is taken for an answer about the
// schema: it is asked again until it works.
func TestFaultsHold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fault answer
		why   string
	}{
		"bad gateway, as a page":  {answer{502, "<html>bad gateway</html>"}, "502"},
		"unavailable":             {answer{503, `{"error_code":50301,"message":"starting"}`}, "503"},
		"not let in":              {answer{401, `{"error_code":401,"message":"Unauthorized"}`}, "let this user in"},
		"forbidden":               {answer{403, "<html>no</html>"}, "let this user in"},
		"not found, but by whom":  {answer{404, "<html>nginx</html>"}, "404"},
		"not found, another code": {answer{404, `{"error_code":404,"message":"HTTP 404 Not Found"}`}, "404"},
		"no JSON":                 {answer{200, "<html>log in</html>"}, "200"},
		"no schema":               {answer{200, "{}"}, "no schema in it"},
		"too large":               {answer{200, `{"schema":"` + strings.Repeat("x", maxAnswer) + `"}`}, "larger than"},
		"too many requests":       {answer{429, "slow down"}, "429"},
		"error without end":       {answer{500, strings.Repeat("x", 1<<20)}, "500"},
		"redirected to nowhere":   {answer{302, ""}, "302"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t, plainHTTP)
			f.set("/schemas/ids/7", c.fault)
			r := newRegistry(t, f.URL, func(c *Config) { c.Patience = time.Nanosecond })
			_, err := find(t, r, id(7), func(p *decode.PendingError) bool { return p.Why != nil && f.asked("/schemas/ids/7") > 1 })
			if err == nil || !strings.Contains(err.Error(), c.why) {
				t.Fatalf("error %v, want %q in it", err, c.why)
			}
			if len(err.Error()) > 1000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
			f.set("/schemas/ids/7", found(orderSchema))
			if s, err := find(t, r, id(7), nil); err != nil || s == nil {
				t.Fatalf("after it works again: %v", err)
			}
		})
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	r := newRegistry(t, "http://127.0.0.1:1", nil)
	if _, err := find(t, r, id(7), func(p *decode.PendingError) bool { return p.Why != nil }); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Fatalf("error %v", err)
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	f.hold = make(chan struct{})
	r := newRegistry(t, f.URL, func(c *Config) { c.Timeout = 50 * time.Millisecond })
	if _, err := find(t, r, id(7), func(p *decode.PendingError) bool { return p.Why != nil }); err == nil || !strings.Contains(err.Error(), "exceeded") {
		t.Fatalf("error %v", err)
	}
}

// A request under way does not keep a stop from ending.
func TestStopEndsRequests(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	f.hold = make(chan struct{})
	r := New(Config{URL: f.URL, Timeout: time.Hour})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	_, _ = r.Find(id(7))
	for f.asked("/schemas/ids/7") == 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("it was never asked")
		}
	}
	cancel()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("it does not end")
	}
}

func TestNotFoundIsBelievedForAWhile(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	r := newRegistry(t, f.URL, func(c *Config) { c.Patience, c.Believe = 300*time.Millisecond, 300*time.Millisecond })
	_, err := find(t, r, id(9), nil)
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonSchema || !strings.Contains(refused.Why, "schema 9") {
		t.Fatalf("error %v", err)
	}
	if n := f.asked("/schemas/ids/9"); n < 2 {
		t.Errorf("it was believed after %d answers", n)
	}
	// Registered again, it is found once the belief has ended.
	f.set("/schemas/ids/9", found(orderSchema))
	limit := time.Now().Add(patience)
	for {
		s, err := find(t, r, id(9), nil)
		if err == nil && s != nil {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("error %v", err)
		}
	}
}

// An id that no registry gives is the record's fault: to be asked for it,
// registries answer as a proxy does, which would hold the partition for ever.
func TestIDBeyondAll(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	for _, n := range []uint32{1 << 31, 1<<32 - 1} {
		f.set(fmt.Sprintf("/schemas/ids/%d", n), answer{404, `{"error_code":404,"message":"HTTP 404 Not Found"}`})
		_, err := newRegistry(t, f.URL, nil).Find(id(n))
		var refused *decode.Refusal
		if !errors.As(err, &refused) || refused.Reason != decode.ReasonMalformed {
			t.Errorf("%d: %v", n, err)
		}
	}
}

// What the registry has and Avro cannot be read by is an answer.
func TestUnusable(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer answer
		reason decode.Reason
	}{
		"another type":   {answer{200, `{"schema":"syntax = \"proto3\";","schemaType":"PROTOBUF"}`}, decode.ReasonUnsupported},
		"not valid":      {found(`{"type":"mystery"}`), decode.ReasonSchema},
		"deep":           {found(strings.Repeat("[", 100_000)), decode.ReasonSchema},
		"unknown name":   {found(`{"type":"record","name":"r","fields":[{"name":"x","type":"other"}]}`), decode.ReasonSchema},
		"deep by naming": {found(`{"type":"array","items":` + strings.Repeat(`{"type":"array","items":`, 140) + `"int"` + strings.Repeat("}", 141)), decode.ReasonSchema},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t, plainHTTP)
			f.set("/schemas/ids/7", c.answer)
			_, err := find(t, newRegistry(t, f.URL, nil), id(7), nil)
			var refused *decode.Refusal
			if !errors.As(err, &refused) || refused.Reason != c.reason {
				t.Fatalf("error %v", err)
			}
		})
	}
}

func TestReferences(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	to := func(subject string) map[string]any {
		return map[string]any{"name": subject, "subject": subject, "version": 1}
	}
	f.set("/schemas/ids/7", found(`{"type":"record","name":"order","fields":[{"name":"a","type":"address"},{"name":"c","type":"country"}]}`, to("address"), to("country")))
	f.set("/subjects/address/versions/1", found(`{"type":"record","name":"address","fields":[{"name":"c","type":"country"}]}`, to("country")))
	f.set("/subjects/country/versions/1", found(`{"type":"enum","name":"country","symbols":["DE"]}`))
	r := newRegistry(t, f.URL, nil)
	s, err := find(t, r, id(7), nil)
	if err != nil {
		t.Fatal(err)
	}
	d, err := decode.NewTopic(decode.TopicConfig{
		Format: decode.FormatAvro, ValueSchema: s, Relation: &decode.Relation{Name: "t", Columns: []decode.Column{{Name: "a"}, {Name: "c"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ch, err := d.Decode(&decode.Record{Value: []byte{0, 0}})
	if err != nil || string(ch.After[0].Bytes) != `{"c":"DE"}` || string(ch.After[1].Bytes) != "DE" {
		t.Fatalf("%+v, %v", ch, err)
	}

	// A circle ends: what it names is not defined.
	f.set("/schemas/ids/8", found(`{"type":"record","name":"x","fields":[{"name":"y","type":"y"}]}`, to("y")))
	f.set("/subjects/y/versions/1", found(`{"type":"record","name":"y","fields":[{"name":"z","type":"z"}]}`, to("z")))
	f.set("/subjects/z/versions/1", found(`{"type":"record","name":"z","fields":[{"name":"y","type":"y"}]}`, to("y")))
	var refused *decode.Refusal
	if _, err := find(t, r, id(8), nil); !errors.As(err, &refused) {
		t.Fatalf("error %v", err)
	}
	// A chain that is too long.
	f.set("/schemas/ids/9", found(orderSchema, to("c0")))
	for i := range 40 {
		f.set(fmt.Sprintf("/subjects/c%d/versions/1", i), found(fmt.Sprintf(`{"type":"record","name":"c%d","fields":[]}`, i), to(fmt.Sprintf("c%d", i+1))))
	}
	if _, err := find(t, r, id(9), nil); !errors.As(err, &refused) || refused.Reason != decode.ReasonLimit {
		t.Fatalf("error %v", err)
	}
	// A reference that is away holds.
	f.set("/schemas/ids/10", found(orderSchema, to("gone")))
	f.set("/subjects/gone/versions/1", answer{500, "x"})
	if _, err := find(t, r, id(10), func(p *decode.PendingError) bool { return p.Why != nil }); err == nil || !strings.Contains(err.Error(), `"gone"`) {
		t.Fatalf("error %v", err)
	}
}

func TestGUID(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	ref := decode.SchemaRef{Kind: decode.SchemaGUID, GUID: [16]byte{0x89, 0x79, 15: 1}}
	f.set("/schemas/guids/89790000-0000-0000-0000-000000000001", found(orderSchema))
	r := newRegistry(t, f.URL, func(c *Config) {
		c.User, c.Password, c.Patience = "u", func() (string, error) { return "p", nil }, time.Nanosecond
	})
	if s, err := find(t, r, ref, nil); err != nil || s == nil {
		t.Fatal(err)
	}
	if f.auth != "Basic dTpw" {
		t.Errorf("authorization %q", f.auth)
	}
	ref.GUID[0] = 0
	var refused *decode.Refusal
	if _, err := find(t, r, ref, nil); !errors.As(err, &refused) {
		t.Fatalf("error %v", err)
	}
	f.set("/schemas/guids/"+ref.GUIDText(), answer{200, "<html>"})
	ref.GUID[0] = 1
	f.set("/schemas/guids/"+ref.GUIDText(), answer{200, "<html>"})
	if _, err := find(t, r, ref, func(p *decode.PendingError) bool { return p.Why != nil }); err == nil || !strings.Contains(err.Error(), "no JSON") {
		t.Fatalf("error %v", err)
	}
}

// Secrets are read with each attempt, and stand in no error.
func TestAuthorization(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	f.set("/schemas/ids/7", answer{401, "no"})
	var mu sync.Mutex
	token, fail := "first-secret", error(nil)
	r := newRegistry(t, f.URL, func(c *Config) {
		c.Token = func() (string, error) { mu.Lock(); defer mu.Unlock(); return token, fail }
	})
	_, err := find(t, r, id(7), func(p *decode.PendingError) bool { return p.Why != nil })
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Fatalf("error %v", err)
	}
	if f.auth != "Bearer first-secret" {
		t.Errorf("authorization %q", f.auth)
	}
	mu.Lock()
	fail = errors.New("file is gone")
	mu.Unlock()
	if _, err = find(t, r, id(7), func(p *decode.PendingError) bool { return strings.Contains(fmt.Sprint(p.Why), "file is gone") }); err == nil {
		t.Fatal("no error")
	}
	f.set("/schemas/ids/7", found(orderSchema))
	mu.Lock()
	token, fail = "second-secret", nil
	mu.Unlock()
	if _, err := find(t, r, id(7), nil); err != nil {
		t.Fatal(err)
	}
	if f.auth != "Bearer second-secret" {
		t.Errorf("authorization %q", f.auth)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	f := newFake(t, httptest.NewTLSServer)
	f.Config.ErrorLog = nil
	f.set("/schemas/ids/7", found(orderSchema))
	stranger := newRegistry(t, f.URL, nil)
	if _, err := find(t, stranger, id(7), func(p *decode.PendingError) bool { return p.Why != nil }); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Fatalf("error %v", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(f.Certificate())
	r := newRegistry(t, f.URL, func(c *Config) { c.TLS = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12} })
	if _, err := find(t, r, id(7), nil); err != nil {
		t.Fatal(err)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	s, err := decode.ParseAvro(orderSchema)
	if err != nil {
		t.Fatal(err)
	}
	r := New(Config{Files: []File{{Ref: id(7), Schema: s}}}) // nothing runs: nothing is asked for
	for _, ref := range []decode.SchemaRef{id(7), {Kind: decode.SchemaFingerprint, Fingerprint: s.Fingerprint()}} {
		if got, err := r.Find(ref); got != s || err != nil {
			t.Fatalf("%v: %v", ref, err)
		}
	}
	for _, ref := range []decode.SchemaRef{id(8), {Kind: decode.SchemaFingerprint, Fingerprint: 1}} {
		var refused *decode.Refusal
		if _, err := r.Find(ref); !errors.As(err, &refused) || refused.Reason != decode.ReasonSetup {
			t.Fatalf("%v: %v", ref, err)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	for status, ok := range map[int]bool{200: true, 404: true, 401: false, 403: false, 500: false, 503: false} {
		f.set("/schemas/types", answer{status, "[]"})
		if err := New(Config{URL: f.URL}).Check(t.Context()); (err == nil) != ok {
			t.Errorf("status %d: %v", status, err)
		}
	}
	if err := New(Config{URL: "http://127.0.0.1:1"}).Check(t.Context()); err == nil {
		t.Error("an unreachable registry passes")
	}
	if err := New(Config{}).Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// A topic that names a new schema in each record does not fill the memory.
func TestKeepsFew(t *testing.T) {
	t.Parallel()
	f := newFake(t, plainHTTP)
	for i := range 20 {
		f.set(fmt.Sprintf("/schemas/ids/%d", i), found(orderSchema))
	}
	r := newRegistry(t, f.URL, func(c *Config) { c.Kept = 4 })
	for i := range 20 {
		for _, n := range []int{i, 0} { // 0 is used all the time
			if _, err := find(t, r, id(uint32(n)), nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.known) > 4 || len(r.order) > 4 {
		t.Errorf("%d schemas are kept", len(r.known))
	}
	if n := f.asked("/schemas/ids/0"); n != 1 {
		t.Errorf("the schema that is used was asked for %d times", n)
	}
}
