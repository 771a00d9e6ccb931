package feldera

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/internal/decode"
)

func TestNewRefusesAddresses(t *testing.T) {
	for _, addr := range []string{"", "feldera:8080", "ftp://x", "http://", "http://u:secret@x", "http://x?a=secret", "http://x#secret", "http://x:port-secret"} {
		_, err := New(Config{URL: addr})
		if err == nil {
			t.Errorf("%q was taken", addr)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q is in the error: %v", addr, err)
		}
	}
	if _, err := New(Config{URL: "http://x", CAFile: t.TempDir() + "/none"}); err == nil {
		t.Error("a missing CA file was taken")
	}
}

// server is a real HTTP server, for what a scripted transport cannot show.
func server(t *testing.T, cfg Config, h http.HandlerFunc) *Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	cfg.URL = srv.URL
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

func TestHostileAnswers(t *testing.T) {
	for _, c := range []struct {
		name string
		h    http.HandlerFunc
		want Class
		text string
	}{
		{"html in a 200", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>sign in</html>")
		}, ClassRetry, "<html>sign in"},
		{"cut short", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, `{"global_metrics":{`)
		}, ClassRetry, "unexpected EOF"},
		{"too large", func(w http.ResponseWriter, _ *http.Request) {
			chunk := strings.Repeat("x", 1<<20)
			for range 60 {
				if _, err := io.WriteString(w, chunk); err != nil {
					return
				}
			}
		}, ClassRetry, "larger than the bound"},
		{"a redirect", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://elsewhere.test/", http.StatusFound)
		}, ClassStopOperator, "302"},
		{"duplicate members", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"global_metrics":{"state":"Running","state":"Paused"}}`)
		}, ClassRetry, "duplicate"},
		{"a number where text is promised", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"global_metrics":{"state":7}}`)
		}, ClassRetry, "promised JSON"},
		{"no incarnation", func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"global_metrics":{"state":"Running"}}`)
		}, ClassStopOperator, "incarnation_uuid"},
		{"a hijacked connection", func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		}, ClassRetry, "EOF"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := server(t, Config{}, c.h)
			_, err := cl.Stats(t.Context())
			if err == nil || Classify(err) != c.want || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v (%s)", err, Classify(err))
			}
		})
	}
}

// A slow answer ends by the request's own time-out, and says so.
func TestTimeout(t *testing.T) {
	release := make(chan struct{})
	cl := server(t, Config{RequestTimeout: 20 * time.Millisecond}, func(w http.ResponseWriter, _ *http.Request) {
		_ = http.NewResponseController(w).Flush() // a client that sees no header times out as well
		<-release
	})
	t.Cleanup(func() { close(release) }) // before the server waits for its handlers
	_, err := cl.Stats(t.Context())
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no complete answer within 20ms") {
		t.Error(err)
	}
}

// Nothing was sent where no connection was made: such a write is no riddle.
func TestRefusedConnectionIsCertain(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{URL: "http://" + addr})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Writer(ordersTable(true)).post(t.Context(), []byte("[]"))
	if Classify(err) != ClassRetry {
		t.Errorf("%v is %s", err, Classify(err))
	}
}

func TestTLS(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	c, err := New(Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	_, err = c.Writer(ordersTable(true)).Send(t.Context(), &Array{})
	var refused *decode.Refusal
	if !errors.As(err, &refused) || !strings.Contains(refused.Do, "CA file") {
		t.Errorf("got %v", err)
	}
}

// A CA file is trusted besides the system's authorities, for the whole
// exchange; a file without a certificate is refused.
func TestTLSWithCAFile(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || r.TLS.Version < tls.VersionTLS12 {
			t.Errorf("TLS state %+v", r.TLS)
		}
		_, _ = io.WriteString(w, statsOf("u1", "Running").body)
	}))
	t.Cleanup(srv.Close)
	file := filepath.Join(t.TempDir(), "ca.pem")
	write := func(b []byte) {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}))
	c, err := New(Config{URL: srv.URL, CAFile: file})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	if s, err := c.Stats(t.Context()); err != nil || s.Incarnation != "u1" {
		t.Errorf("%+v, %v", s, err)
	}
	write([]byte("no certificate"))
	if _, err := New(Config{URL: srv.URL, CAFile: file}); err == nil || !strings.Contains(err.Error(), "expected PEM") {
		t.Errorf("got %v", err)
	}
}

// A rotated key is read again after a 401, once a request.
func TestKeyRotation(t *testing.T) {
	var keys atomic.Int32
	cfg := Config{APIKey: func() (string, error) { return fmt.Sprintf("apikey:%d\n", keys.Add(1)), nil }}
	c, s := newScripted(t, cfg, func(_ int, r seen) answer {
		if r.auth != "Bearer apikey:2" {
			return answer{status: 401, body: `{"message":"bad key ` + strings.TrimPrefix(r.auth, "Bearer ") + `","error_code":"AuthenticationFailed"}`}
		}
		return statsOf("u1", "Running")
	})
	if _, err := c.Stats(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(s.requests("/stats")); n != 2 {
		t.Errorf("%d requests", n)
	}
	keys.Store(10)
	c.forgetKey()
	_, err := c.Stats(t.Context())
	if Classify(err) != ClassStopOperator || strings.Contains(err.Error(), "apikey:1") || !strings.Contains(err.Error(), "[redacted]") {
		t.Errorf("got %v", err)
	}
}

func TestUnusableKeyStaysSecret(t *testing.T) {
	c, s := newScripted(t, Config{APIKey: func() (string, error) { return "apikey:sec\nret", nil }}, func(int, seen) answer { return statsOf("u", "Running") })
	_, err := c.Stats(t.Context())
	if err == nil || strings.Contains(err.Error(), "sec") || len(s.paths()) != 0 {
		t.Errorf("%v, %v", err, s.paths())
	}
}

// The array may be filled anew once Send has returned, although the server
// answered before it had read the request.
func TestBodyIsTakenBack(t *testing.T) {
	l := &lender{body: []byte("rows")}
	r, late := l.reader(), l.reader()
	buf := make([]byte, 2)
	if n, err := r.Read(buf); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	l.takeBack()
	for _, r := range []io.Reader{r, late} {
		if n, err := r.Read(buf); n != 0 || !errors.Is(err, io.ErrClosedPipe) {
			t.Error(n, err)
		}
	}
}

func TestObserve(t *testing.T) {
	var got []string
	cfg := Config{Observe: func(endpoint, outcome string, _ time.Duration) { got = append(got, endpoint+" "+outcome) }}
	c, _ := newScripted(t, cfg, func(n int, _ seen) answer {
		if n == 1 {
			return answer{status: 503, body: `{"error_code":"Initializing"}`}
		}
		return statsOf("u", "Running")
	})
	_, _ = c.Stats(t.Context())
	_, _ = c.Stats(t.Context())
	if strings.Join(got, ",") != "stats retry,stats ok" {
		t.Error(got)
	}
}

func TestTokens(t *testing.T) {
	tok, err := parseToken("eyJ1IjoiMDE5YTAwMDAtMDAwMC03MDAwLTgwMDAtMDAwMDAwMDAwMDAwIiwiZSI6MCwiYyI6M30")
	if err != nil || tok.Incarnation != "019a0000-0000-7000-8000-000000000000" {
		t.Error(tok, err)
	}
	for _, raw := range []string{"", "?", "e30", "eyJ1IjoiIn0", "eyJ1IjoxfQ", strings.Repeat("A", maxToken+1)} {
		if tok, err := parseToken(raw); err == nil {
			t.Errorf("%.20q was taken: %v", raw, tok)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add("eyJ1IjoiMDE5YTAwMDAtMDAwMC03MDAwLTgwMDAtMDAwMDAwMDAwMDAwIiwiZSI6MCwiYyI6M30=")
	f.Fuzz(func(t *testing.T, raw string) {
		tok, err := parseToken(raw)
		if err == nil && (tok.Incarnation == "" || len(tok.Incarnation) > maxIncarnation || tok.Raw != raw) {
			t.Fatal(tok)
		}
	})
}

// Whatever an answer is, it ends in a value of the contract or in an error
// that is bounded and has one line.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte(`{"global_metrics":{"state":"Running","incarnation_uuid":"u1","transaction_id":1,"transaction_msecs":9223372036854775807,"transaction_initiators":{"initiated_by_api":"Started","initiated_by_connectors":{"a":{}}}},"suspend_error":{"Permanent":["X"]},"inputs":[{"endpoint_name":"a.api-ingress-1","metrics":{"num_parse_errors":1},"fatal_error":{"x":1}}],"outputs":[{}],"checkpoint_activity":{"status":"delayed","reasons":[1,"x",null]}}`))
	f.Add([]byte(`{"status":"complete","step":18446744073709551615}`))
	f.Add([]byte(`{"status":"complete","step":null}`))
	f.Add([]byte(`{"transaction_id":-1}`))
	f.Add([]byte(`{"checkpoint_sequence_number":0,"incarnation_uuid":"u1"}`))
	f.Add([]byte(`{"success":1,"failure":{"sequence_number":1,"error":"e"}}`))
	f.Add([]byte(`{"token":"e30"}`))
	f.Add([]byte(`{"holdfast_rows":1}` + "\n" + `{"holdfast_rows":2}`))
	f.Add([]byte("\xff<html>\x00"))
	f.Fuzz(func(t *testing.T, body []byte) {
		c, _ := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: string(body)} })
		c.Expect("u1")
		ctx := t.Context()
		d := c.NewDurability(DurabilityOptions{})
		for name, ask := range map[string]func() error{
			"stats": func() error {
				s, err := c.Stats(ctx)
				if err == nil {
					_, _ = s.Stalled(), s.Transaction.String()
					if s.Incarnation == "" {
						t.Error("statistics without an incarnation")
					}
				}
				return err
			},
			"completion": func() error {
				st, err := c.completion(ctx, Token{Raw: "x"})
				if err == nil && st.complete && st.step == nil {
					t.Error("complete without a step")
				}
				return err
			},
			"start": func() error {
				id, err := c.start(ctx)
				if err == nil && id <= 0 {
					t.Errorf("transaction %d", id)
				}
				return err
			},
			"checkpoint": func() error { _, err := d.request(ctx, "u1"); return err },
			"checkpoint status": func() error {
				done, err := d.finished(ctx, "u1", 1)
				if err == nil && done {
					t.Error("done, and /stats was no answer") // one body cannot be both
				}
				return err
			},
			"post": func() error {
				tok, err := c.Writer(ordersTable(true)).post(ctx, []byte("[]"))
				if err == nil && tok.Incarnation != "u1" {
					t.Errorf("a token of %q", tok.Incarnation)
				}
				return err
			},
			"query": func() error { return c.Query(ctx, Query{Select: "SELECT 1"}, func([]byte) error { return nil }) },
		} {
			err := ask()
			if err == nil {
				continue
			}
			if text := err.Error(); len(text) > 4*maxMessage || strings.ContainsAny(text, "\n\r\x1b") {
				t.Errorf("%s: an error of %d bytes: %.200q", name, len(text), text)
			}
			_ = Classify(err)
		}
	})
}

// The texts that blame compares come from outside, and so can the rows.
func FuzzBlamed(f *testing.F) {
	f.Add([]byte(`[{"insert":{"id":1}}]`), `{"id":1}`, "7", 2)
	f.Fuzz(func(t *testing.T, body []byte, first, second string, total int) {
		got := blamed(body, total, []rowFault{{InvalidText: &first}, {InvalidText: &second}})
		if got == blameOwn && (!strings.Contains(string(body), first) || !strings.Contains(string(body), second)) {
			t.Errorf("%q and %q are not in %q", first, second, body)
		}
	})
}

// A refusal whose answer breaks off says nothing but that it was one: whether
// the rows were refused, or the request, is asked again.
func TestAnswerCutShort(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		body   string
		want   Class
	}{
		{"a refusal of rows", http.StatusBadRequest, `{"message":"Errors parsing input data (1 errors)","error_code":"Par`, ClassRetryUncertain},
		{"a process that ends", http.StatusGone, `{"message":"Pip`, ClassRetryUncertain},
		{"a refusal of the key", http.StatusUnauthorized, `{"mess`, ClassStopOperator},
		{"an unknown table", http.StatusNotFound, `{"mess`, ClassStopOperator},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := server(t, Config{}, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Length", fmt.Sprint(len(c.body)+100))
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			})
			_, err := client.Writer(ordersTable(true)).post(t.Context(), []byte("[]"))
			if err == nil || Classify(err) != c.want {
				t.Errorf("%v is %s, want %s", err, Classify(err), c.want)
			}
			want := c.want
			if want == ClassRetryUncertain {
				want = ClassRetry
			}
			_, err = client.completion(t.Context(), Token{Raw: "x"})
			if err == nil || Classify(err) != want {
				t.Errorf("a question: %v is %s, want %s", err, Classify(err), want)
			}
		})
	}
}
