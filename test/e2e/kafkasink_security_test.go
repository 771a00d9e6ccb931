package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// authority signs certificates for one test.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	n    int64
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key, a.cert = a.make(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil)
	a.write("ca.pem", a.cert, nil)
	return a
}

func (a *authority) make(template *x509.Certificate, signer *authority) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.n++
	template.SerialNumber = big.NewInt(a.n)
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, with := template, key
	if signer != nil {
		parent, with = signer.cert, signer.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), with)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert
}

// write puts a certificate, and a key before it, into a PEM file.
func (a *authority) write(name string, cert *x509.Certificate, key *ecdsa.PrivateKey) {
	a.t.Helper()
	var text []byte
	if key != nil {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			a.t.Fatal(err)
		}
		text = pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	}
	text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})...)
	if err := os.WriteFile(a.file(name), text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func (a *authority) file(name string) string { return filepath.Join(a.dir, name) }

// issue writes a certificate with its key for a name, and gives the file.
func (a *authority) issue(name string, hosts ...string) string {
	a.t.Helper()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	key, cert := a.make(template, a)
	a.write(name+".pem", cert, key)
	return a.file(name + ".pem")
}

// bearer is a token without a signature, which a broker takes that was not told
// how to check one.
func bearer(user string, life time.Duration) string {
	part := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	now := time.Now()
	return part(`{"alg":"none"}`) + "." + part(fmt.Sprintf(`{"sub":%q,"iat":%d,"exp":%d}`, user, now.Add(-time.Minute).Unix(), now.Add(life).Unix())) + "."
}

// TestKafkasinkConnections: every way to connect and to log in, and what is
// said where it is the wrong one.
func TestKafkasinkConnections(t *testing.T) {
	t.Parallel()
	ca, stranger := newAuthority(t, "the brokers' authority"), newAuthority(t, "another authority")
	broker := ca.issue("broker", "127.0.0.1", "localhost", "kafka.internal")
	elsewhere := ca.issue("elsewhere", "elsewhere.example.com")
	settings := map[string]string{
		"ssl.keystore.type": "PEM", "ssl.keystore.location": broker, "ssl.truststore.type": "PEM", "ssl.truststore.location": ca.file("ca.pem"),
		"listener.name.mutual.ssl.client.auth":             "required",
		"listener.name.elsewhere.ssl.keystore.type":        "PEM",
		"listener.name.elsewhere.ssl.keystore.location":    elsewhere,
		"sasl.enabled.mechanisms":                          "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
		"connections.max.reauth.ms":                        "5000",
		"authorizer.class.name":                            "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
		"super.users":                                      "User:ANONYMOUS;User:app;User:CN=client",
		"listener.name.login.plain.sasl.jaas.config":       `org.apache.kafka.common.security.plain.PlainLoginModule required user_app="pw" user_guest="pw";`,
		"listener.name.login.oauthbearer.sasl.jaas.config": `org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";`,
		"listener.name.openlogin.sasl.enabled.mechanisms":  "SCRAM-SHA-256",
	}
	for _, listener := range []string{"login", "openlogin"} {
		for _, m := range []string{"256", "512"} {
			settings["listener.name."+listener+".scram-sha-"+m+".sasl.jaas.config"] = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
		}
	}
	kafka := harness.NeedKafka(t, harness.KafkaOptions{
		Settings:  settings,
		Listeners: map[string]string{"TLS": "SSL", "MUTUAL": "SSL", "ELSEWHERE": "SSL", "LOGIN": "SASL_SSL", "OPENLOGIN": "SASL_PLAINTEXT"},
		Scram:     []string{"SCRAM-SHA-256=[name=app,password=pw]", "SCRAM-SHA-512=[name=app,password=pw]", "SCRAM-SHA-256=[name=guest,password=pw]"},
	})
	tokens := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if id, secret, _ := r.BasicAuth(); id != "id" || secret != "pw" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = fmt.Fprintf(w, `{"access_token":%q,"expires_in":5}`, bearer("app", time.Hour))
	}))
	t.Cleanup(tokens.Close)
	tokenFile := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, []byte(bearer("app", time.Hour)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	client := ca.issue("client")
	unknown := stranger.issue("client")
	withTLS := map[string]string{"KAFKASINK_TLS": "true", "KAFKASINK_CA_FILE": ca.file("ca.pem")}
	login := func(mechanism, user, password string) map[string]string {
		return map[string]string{"KAFKASINK_SASL_MECHANISM": mechanism, "KAFKASINK_SASL_USER": user, "KAFKASINK_SASL_PASSWORD": password}
	}
	oauth := map[string]string{"KAFKASINK_SASL_MECHANISM": "oauthbearer"}
	env := func(parts ...map[string]string) map[string]string {
		out := map[string]string{}
		for _, p := range parts {
			maps.Copy(out, p)
		}
		return out
	}

	for name, tc := range map[string]struct {
		listener string
		env      map[string]string
	}{
		"tls":                {"TLS", withTLS},
		"tls by server name": {"TLS", env(withTLS, map[string]string{"KAFKASINK_SERVER_NAME": "kafka.internal"})},
		"client certificate": {"MUTUAL", env(withTLS, map[string]string{"KAFKASINK_CLIENT_CERT_FILE": client, "KAFKASINK_CLIENT_KEY_FILE": client})},
		"plain":              {"LOGIN", env(withTLS, login("plain", "app", "pw"))},
		"scram 256":          {"LOGIN", env(withTLS, login("scram-sha-256", "app", "pw"))},
		"scram 512":          {"LOGIN", env(withTLS, login("scram-sha-512", "app", "pw"))},
		"scram without tls":  {"OPENLOGIN", login("scram-sha-256", "app", "pw")},
		"token from a file":  {"LOGIN", env(withTLS, oauth, map[string]string{"KAFKASINK_SASL_TOKEN_FILE": tokenFile})},
		"token fetched":      {"LOGIN", env(withTLS, login("oauthbearer", "id", "pw"), map[string]string{"KAFKASINK_SASL_TOKEN_URL": tokens.URL})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &sinkWorld{t: t, kafka: kafka, sim: startSim(t, felderasim.Options{}), topic: "ok-" + strings.ReplaceAll(name, " ", "-")}
			w.group = "g-" + w.topic
			if err := kafka.CreateTopic(t.Context(), w.topic, 3, nil); err != nil {
				t.Fatal(err)
			}
			connects := env(tc.env, map[string]string{"KAFKASINK_BROKERS": kafka.Listener(tc.listener)})
			d := w.start(connects)
			w.produceOrders(0, 0, 10, "a")
			w.awaitCommitted(map[int32]int64{0: 10})
			if name == "scram 256" || name == "token fetched" { // beyond the life of a login
				for end := time.Now().Add(8 * time.Second); time.Now().Before(end); {
					w.committed()
				}
				w.produceOrders(0, 10, 20, "b")
				w.awaitCommitted(map[int32]int64{0: 20})
			}
			waitHealthy(t, d)
			says(t, w.verb(connects, "verify"), 0, "they agree") // which connects as the daemon does
		})
	}

	if err := kafka.CreateTopic(t.Context(), "there", 1, nil); err != nil {
		t.Fatal(err)
	}
	sim := startSim(t, felderasim.Options{})
	for name, tc := range map[string]struct {
		listener string
		env      map[string]string
		code     int
		says     []string
	}{
		"wrong password":              {"LOGIN", env(withTLS, login("scram-sha-256", "app", "wr0ng")), 65, []string{"do not accept it", "KAFKASINK_SASL_PASSWORD"}},
		"wrong plain password":        {"LOGIN", env(withTLS, login("plain", "app", "wr0ng")), 65, []string{"do not accept it", "KAFKASINK_SASL_PASSWORD"}},
		"unknown user":                {"OPENLOGIN", login("scram-sha-256", "nobody", "wr0ng"), 65, []string{"do not accept it"}},
		"token that is no token":      {"LOGIN", env(withTLS, oauth, map[string]string{"KAFKASINK_SASL_TOKEN": "wr0ng"}), 65, []string{"do not accept it"}},
		"token endpoint refuses":      {"LOGIN", env(withTLS, login("oauthbearer", "id", "wr0ng"), map[string]string{"KAFKASINK_SASL_TOKEN_URL": tokens.URL}), 69, []string{"no token for the login", "401"}},
		"mechanism not offered":       {"OPENLOGIN", login("scram-sha-512", "app", "pw"), 65, []string{"do not offer this mechanism"}},
		"no login where one is due":   {"OPENLOGIN", nil, 69, []string{"closed the connection", "KAFKASINK_SASL_MECHANISM"}},
		"login where none is due":     {"TLS", env(withTLS, login("plain", "app", "pw")), 65, []string{"login"}},
		"tls to a port without":       {"OPENLOGIN", env(withTLS, login("scram-sha-256", "app", "pw")), 69, []string{"KAFKASINK_TLS=false"}},
		"no tls to a port with it":    {"LOGIN", login("scram-sha-256", "app", "pw"), 65, []string{"KAFKASINK_TLS=true"}},
		"no tls, no login to a port":  {"TLS", nil, 65, []string{"KAFKASINK_TLS=true"}},
		"authority not known":         {"TLS", map[string]string{"KAFKASINK_TLS": "true"}, 65, []string{"KAFKASINK_CA_FILE"}},
		"certificate of another name": {"ELSEWHERE", withTLS, 65, []string{"KAFKASINK_SERVER_NAME", "it is for another name"}},
		"no client certificate":       {"MUTUAL", withTLS, 65, []string{"KAFKASINK_CLIENT_CERT_FILE"}},
		"client certificate unknown":  {"MUTUAL", env(withTLS, map[string]string{"KAFKASINK_CLIENT_CERT_FILE": unknown, "KAFKASINK_CLIENT_KEY_FILE": unknown}), 65, []string{"KAFKASINK_CLIENT_CERT_FILE"}},
		"topic not authorised":        {"OPENLOGIN", login("scram-sha-256", "guest", "pw"), 65, []string{"kafka-acls", "--topic there", "--group"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &sinkWorld{t: t, kafka: kafka, sim: sim, topic: "there", group: "g-there"}
			connects := env(map[string]string{"KAFKASINK_BROKERS": kafka.Listener(tc.listener)}, tc.env)
			r := w.verb(connects, "check")
			says(t, r, tc.code, tc.says...)
			v := w.verb(connects, "verify")
			if v.ExitCode != 65 && v.ExitCode != 69 {
				t.Errorf("verify ends with %d", v.ExitCode)
			}
			all := r.Stdout + r.Stderr + v.Stdout + v.Stderr
			if strings.Contains(all, "wr0ng") || strings.Contains(all, "is SASL missing?") && !strings.Contains(all, "client library says") {
				t.Errorf("it says %s", all)
			}
			t.Logf("%s", all)
		})
	}
}
