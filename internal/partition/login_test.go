package partition

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
)

func secret(text string) func() (string, error) {
	return func() (string, error) { return text, nil }
}

func TestMechanisms(t *testing.T) {
	for _, tc := range []struct {
		sasl SASL
		want string // a mechanism's name, or a part of an error
	}{
		{SASL{Mechanism: "plain", User: "u", Password: secret("p")}, "PLAIN"},
		{SASL{Mechanism: "SCRAM-SHA-256", User: "u", Password: secret("p")}, "SCRAM-SHA-256"},
		{SASL{Mechanism: "scram-sha-512", User: "u", Password: secret("p")}, "SCRAM-SHA-512"},
		{SASL{Mechanism: "oauthbearer", Token: secret("t")}, "OAUTHBEARER"},
		{SASL{Mechanism: "oauthbearer", User: "u", Password: secret("p"), TokenURL: "http://localhost"}, "OAUTHBEARER"},
		{SASL{Mechanism: "aws-msk-iam", User: "u", Password: secret("p"), Token: secret("t")}, "AWS_MSK_IAM"},
		{SASL{Mechanism: "oauthbearer", User: "u", Password: secret("p")}, "the URL to fetch one from"},
		{SASL{Mechanism: "plain"}, "a user and a password"},
		{SASL{Mechanism: "kerberos", User: "u", Password: secret("p")}, `"kerberos"`},
	} {
		m, err := tc.sasl.mechanism()
		switch {
		case err != nil:
			wantText(t, err, tc.want)
		case m.Name() != tc.want:
			t.Errorf("%s gives %s", tc.sasl.Mechanism, m.Name())
		}
	}
	// The secret is asked for at each login, and its error is said.
	for _, s := range []SASL{
		{Mechanism: "plain", User: "u"}, {Mechanism: "scram-sha-256", User: "u"}, {Mechanism: "aws-msk-iam", User: "u"},
	} {
		s.Password = func() (string, error) { return "", errors.New("the file is gone") }
		m, err := s.mechanism()
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = m.Authenticate(t.Context(), "b-1.kafka.eu-west-1.amazonaws.com:9098")
		wantText(t, err, "read SASL", "the file is gone")
	}
}

// MSK's login is a signed request: what is sent has the key's id and never the
// secret.
func TestMSKLogin(t *testing.T) {
	s := SASL{Mechanism: "aws-msk-iam", User: "AKIDEXAMPLE", Password: secret("very secret"), Token: secret("session")}
	m, err := s.mechanism()
	if err != nil {
		t.Fatal(err)
	}
	_, first, err := m.Authenticate(t.Context(), "b-1.kafka.eu-west-1.amazonaws.com:9098")
	if err != nil {
		t.Fatal(err)
	}
	if text := string(first); !strings.Contains(text, "AKIDEXAMPLE") || !strings.Contains(text, "eu-west-1") || strings.Contains(text, "very secret") {
		t.Errorf("the login is %s", text)
	}
}

func TestTokenEndpoint(t *testing.T) {
	var asked atomic.Int32
	var answer atomic.Value
	answer.Store(`{"access_token":"one","expires_in":100,"token_type":"Bearer"}`)
	var status atomic.Int32
	status.Store(http.StatusOK)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		user, pass, _ := r.BasicAuth()
		if r.Method != http.MethodPost || r.FormValue("grant_type") != "client_credentials" || r.FormValue("scope") != "kafka" || user != "client" || pass != "s%3Acret" {
			t.Errorf("asked with %s %v %s:%s", r.Method, r.Form, user, pass)
		}
		w.WriteHeader(int(status.Load()))
		text, _ := answer.Load().(string)
		_, _ = io.WriteString(w, text)
	}))
	defer srv.Close()
	source := &tokenSource{client: srv.Client(), sasl: &SASL{User: "client", Password: secret("s:cret"), TokenURL: srv.URL, Scope: "kafka"}}
	for range 3 {
		if token, err := source.token(t.Context()); token != "one" || err != nil {
			t.Fatalf("%q, %v", token, err)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times while the token was good", n)
	}
	if left := time.Until(source.until); left < 80*time.Second || left > 90*time.Second {
		t.Errorf("it is kept for %v", left)
	}
	for _, bad := range []struct {
		status int
		body   string
		want   string
	}{
		{http.StatusUnauthorized, `{"error":"s:cret"}`, "401"},
		{http.StatusOK, "<html>", "access_token"},
		{http.StatusOK, `{"access_token":""}`, "access_token"},
		{http.StatusOK, strings.Repeat(" ", maxToken+1), "larger than"},
	} {
		source.until = time.Time{}
		status.Store(int32(bad.status))
		answer.Store(bad.body)
		_, err := source.token(t.Context())
		wantText(t, err, bad.want, "KAFKASINK_SASL_TOKEN_URL")
		if !errors.Is(err, errToken) || strings.Contains(err.Error(), "s:cret") {
			t.Errorf("error %v", err)
		}
	}
	status.Store(http.StatusOK)
	for _, life := range []string{"-5", "1e300", "0"} { // such a token is used once
		answer.Store(`{"access_token":"once","expires_in":` + life + `}`)
		source.until = time.Time{}
		if token, err := source.token(t.Context()); token != "once" || err != nil || time.Until(source.until) > 0 {
			t.Errorf("life %s: %q, %v, until %v", life, token, err, source.until)
		}
	}
}

func TestTLSConfig(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, bad := range []TLSFiles{
		{CA: dir + "/secret-name"}, {CA: file("ca", "nothing")}, {Cert: dir + "/secret-name", Key: dir + "/secret-name"}, {Cert: file("c", "x"), Key: file("k", "y")},
	} {
		_, err := TLSConfig(bad)
		if err == nil || strings.Contains(err.Error(), dir) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	c, err := TLSConfig(TLSFiles{ServerName: "kafka"})
	if err != nil || c.ServerName != "kafka" || c.MinVersion != tls.VersionTLS12 || c.InsecureSkipVerify {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestExplain(t *testing.T) {
	c := &Config{Brokers: []string{"kafka:9092"}, Group: "g", InstanceID: "i", Routes: []Route{{Topic: "orders"}}}
	refusal := func(err error) bool { return errors.As(err, new(*decode.Refusal)) }
	for _, tc := range []struct {
		err     error
		want    string
		operate bool // a person has to act
	}{
		{kerr.SaslAuthenticationFailed, "KAFKASINK_SASL_PASSWORD", true},
		{fmt.Errorf("x: %w", kerr.UnsupportedSaslMechanism), "KAFKASINK_SASL_MECHANISM", true},
		{kerr.IllegalSaslState, "KAFKASINK_SASL_MECHANISM", true},
		{kerr.TopicAuthorizationFailed, "kafka-acls", true},
		{kerr.GroupAuthorizationFailed, "--group g", true},
		{kerr.UnknownTopicOrPartition, "does not exist", true},
		{kerr.FencedInstanceID, "KAFKASINK_INSTANCE_ID", true},
		{x509.UnknownAuthorityError{}, "KAFKASINK_CA_FILE", true},
		{x509.HostnameError{Certificate: &x509.Certificate{}, Host: "h"}, "KAFKASINK_SERVER_NAME", true},
		{x509.CertificateInvalidError{Cert: &x509.Certificate{}, Reason: x509.Expired}, "not valid", true},
		{tls.RecordHeaderError{Msg: "m"}, "KAFKASINK_TLS=false", true},
		{errors.New("the first three bytes received appear to be a tls alert record for TLS v1.2"), "KAFKASINK_TLS=true", true},
		{errors.New("remote error: tls: certificate required"), "KAFKASINK_CLIENT_CERT_FILE", true},
		{io.EOF, "KAFKASINK_SASL_MECHANISM", false},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, "no answer", false},
		{context.DeadlineExceeded, "no answer", false},
		{errToken, "no token", false},
		{kerr.NotCoordinator, "NOT_COORDINATOR", false},
	} {
		err := c.explain("reach", tc.err)
		if !strings.HasPrefix(err.Error(), "reach: ") || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, tc.err) && tc.operate == refusal(err) && !refusal(err) {
			t.Errorf("%v became %v", tc.err, err)
		}
		if refusal(err) != tc.operate {
			t.Errorf("%v: a person has to act: %v", tc.err, refusal(err))
		}
		if again := c.explain("again", err); tc.operate && again.Error() != err.Error() {
			t.Errorf("explained twice: %v", again)
		}
	}
	for _, with := range []Config{{TLS: &tls.Config{MinVersion: tls.VersionTLS12}}, {SASL: &SASL{}}, {TLS: &tls.Config{MinVersion: tls.VersionTLS12}, SASL: &SASL{}}} {
		if err := with.explain("reach", &kgo.ErrFirstReadEOF{}); !strings.Contains(err.Error(), "KAFKASINK_TLS=") {
			t.Errorf("%v", err)
		}
	}
}

func TestExplainDial(t *testing.T) {
	c := &Config{Brokers: []string{"kafka:9092"}}
	away := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for _, tc := range []struct {
		at   kgo.BrokerMetadata
		err  error
		said bool
	}{
		{kgo.BrokerMetadata{NodeID: -2147483648, Host: "kafka", Port: 9092}, away, false},
		{kgo.BrokerMetadata{NodeID: 1, Host: "kafka", Port: 9092}, away, false},
		{kgo.BrokerMetadata{NodeID: 1, Host: "10.0.0.1", Port: 9092}, io.EOF, false},
		{kgo.BrokerMetadata{NodeID: 1, Host: "10.0.0.1", Port: 9092}, away, true},
	} {
		err := c.explainDial(tc.at, tc.err)
		if said := strings.Contains(err.Error(), "advertised.listeners"); said != tc.said || !errors.Is(err, tc.err) {
			t.Errorf("%+v: %v", tc.at, err)
		}
	}
}

// The broker gives an address that nobody can reach.
func TestUnreachableAdvertisedListener(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		cfg := Config{
			Brokers: []string{"seed:9092"}, Group: group, Watcher: w.engine, Logger: w.log,
			Routes: []Route{{Topic: topic, Table: "orders", Destination: w.engine.table("orders"), Decoder: plainDecoder{}}},
			Options: []kgo.Opt{kgo.Dialer(func(ctx context.Context, network, host string) (net.Conn, error) {
				if host != "seed:9092" {
					return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
				}
				return w.network.DialContext(ctx, network, "localhost:9092")
			})},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err := Preflights(cfg)[0].Run(ctx)
		wantText(t, err, "advertised.listeners", "9092", "seed:9092")
	}, kfake.SeedTopics(1, topic))
}
