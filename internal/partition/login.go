package partition

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/aws"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// SASL is how to authenticate to the brokers. Secrets are asked for each time
// a connection authenticates, so that a rotated one is found.
type SASL struct {
	// Mechanism is "plain", "scram-sha-256", "scram-sha-512", "oauthbearer" or
	// "aws-msk-iam".
	Mechanism string
	// User and Password are the login; the client's id and secret where a
	// token is fetched; access key and secret key for aws-msk-iam.
	User     string
	Password func() (string, error)
	// Token is the bearer token of oauthbearer, or the session token of
	// aws-msk-iam; nil where there is none.
	Token func() (string, error)
	// TokenURL, where oauthbearer has no Token, is asked for one by the client
	// credentials grant, for Scope.
	TokenURL, Scope string
}

// mechanism makes the client's SASL mechanism.
func (s *SASL) mechanism() (sasl.Mechanism, error) {
	name := strings.ToLower(s.Mechanism)
	if name == "oauthbearer" && s.Token != nil {
		return oauth.Oauth(func(context.Context) (oauth.Auth, error) {
			token, err := ask(s.Token, "token")
			return oauth.Auth{Token: token}, err
		}), nil
	}
	if s.User == "" || s.Password == nil {
		return nil, errors.New("SASL needs a user and a password")
	}
	scramAuth := func(context.Context) (scram.Auth, error) {
		pass, err := ask(s.Password, "password")
		return scram.Auth{User: s.User, Pass: pass}, err
	}
	switch name {
	case "plain":
		return plain.Plain(func(context.Context) (plain.Auth, error) {
			pass, err := ask(s.Password, "password")
			return plain.Auth{User: s.User, Pass: pass}, err
		}), nil
	case "scram-sha-256":
		return scram.Sha256(scramAuth), nil
	case "scram-sha-512":
		return scram.Sha512(scramAuth), nil
	case "oauthbearer":
		if s.TokenURL == "" {
			return nil, errors.New("SASL oauthbearer needs a token, or the URL to fetch one from")
		}
		source := &tokenSource{sasl: s, client: &http.Client{Timeout: 10 * time.Second}}
		return oauth.Oauth(func(ctx context.Context) (oauth.Auth, error) {
			token, err := source.token(ctx)
			return oauth.Auth{Token: token}, err
		}), nil
	case "aws-msk-iam":
		return aws.ManagedStreamingIAM(func(context.Context) (aws.Auth, error) {
			auth := aws.Auth{AccessKey: s.User}
			var err error
			if auth.SecretKey, err = ask(s.Password, "secret key"); err != nil {
				return auth, err
			}
			if s.Token != nil {
				auth.SessionToken, err = ask(s.Token, "session token")
			}
			return auth, err
		}), nil
	}
	return nil, fmt.Errorf("SASL mechanism %q is not plain, scram-sha-256, scram-sha-512, oauthbearer or aws-msk-iam", s.Mechanism)
}

func ask(secret func() (string, error), what string) (string, error) {
	text, err := secret()
	if err != nil {
		return "", fmt.Errorf("read SASL %s: %w", what, err)
	}
	return text, nil
}

// tokenSource fetches bearer tokens by the client credentials grant (RFC 6749,
// section 4.4) and keeps one until a tenth of its life is left. It is safe for
// concurrent use; connections that authenticate at once share one request.
type tokenSource struct {
	sasl   *SASL
	client *http.Client

	mu    sync.Mutex
	kept  string
	until time.Time
}

// maxToken bounds what is read of a token endpoint's answer.
const maxToken = 64 << 10

// errToken says that it is the token endpoint that failed, not the brokers.
var errToken = errors.New("no token for the login")

func (s *tokenSource) token(ctx context.Context) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept != "" && time.Now().Before(s.until) {
		return s.kept, nil
	}
	token, life, err := s.fetch(ctx)
	if err != nil {
		return "", fmt.Errorf("%w: fetch it from the endpoint that KAFKASINK_SASL_TOKEN_URL names: %w", errToken, err)
	}
	s.kept, s.until = token, time.Now().Add(life*9/10)
	return token, nil
}

func (s *tokenSource) fetch(ctx context.Context) (token string, life time.Duration, err error) {
	secret, err := ask(s.sasl.Password, "password")
	if err != nil {
		return "", 0, err
	}
	form := url.Values{"grant_type": {"client_credentials"}}
	if s.sasl.Scope != "" {
		form.Set("scope", s.sasl.Scope)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.sasl.TokenURL, strings.NewReader(form.Encode()))
	if err != nil {
		return "", 0, errors.New("the URL cannot be used")
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.SetBasicAuth(url.QueryEscape(s.sasl.User), url.QueryEscape(secret))
	res, err := s.client.Do(req)
	if err != nil {
		return "", 0, fmt.Errorf("ask for it: %w", err)
	}
	defer func() { _ = res.Body.Close() }() // read only: nothing can be lost
	body, err := io.ReadAll(io.LimitReader(res.Body, maxToken+1))
	switch {
	case err != nil:
		return "", 0, fmt.Errorf("read the answer: %w", err)
	case res.StatusCode != http.StatusOK:
		// The body may repeat what was sent, so it is not shown.
		return "", 0, fmt.Errorf("it answered %s: are KAFKASINK_SASL_USER, KAFKASINK_SASL_PASSWORD and KAFKASINK_SASL_SCOPE right?", res.Status)
	case len(body) > maxToken:
		return "", 0, fmt.Errorf("its answer is larger than %d bytes", maxToken)
	}
	var answer struct {
		Token string  `json:"access_token"`
		Life  float64 `json:"expires_in"`
	}
	if json.Unmarshal(body, &answer) != nil || answer.Token == "" {
		return "", 0, errors.New("its answer is not a JSON object with an access_token")
	}
	// Without a life, or with an absurd one, the next login asks again.
	if answer.Life < 0 || answer.Life > (365*24*time.Hour).Seconds() {
		answer.Life = 0
	}
	return answer.Token, time.Duration(answer.Life * float64(time.Second)), nil
}

// TLSFiles names what TLS to the brokers needs beside the system's roots; all
// may be empty.
type TLSFiles struct {
	// CA signs the brokers' certificates.
	CA string
	// Cert and Key are the client's own.
	Cert, Key string
	// ServerName is expected in the brokers' certificates instead of the name
	// that is dialed.
	ServerName string
}

// TLSConfig makes the configuration of TLS connections. The client's
// certificate is read again for each connection, so that a rotated one is
// found; the CA is read once. Errors name no path.
func TLSConfig(files TLSFiles) (*tls.Config, error) {
	out := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: files.ServerName}
	if files.CA != "" {
		pem, err := os.ReadFile(files.CA)
		if err != nil {
			return nil, fmt.Errorf("read KAFKASINK_CA_FILE: %w", withoutPath(err))
		}
		out.RootCAs = x509.NewCertPool()
		if !out.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("KAFKASINK_CA_FILE holds no certificate in PEM form")
		}
	}
	if files.Cert == "" {
		return out, nil
	}
	own := func() (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
		if err != nil {
			return nil, fmt.Errorf("read KAFKASINK_CLIENT_CERT_FILE and KAFKASINK_CLIENT_KEY_FILE: %w", withoutPath(err))
		}
		return &pair, nil
	}
	if _, err := own(); err != nil {
		return nil, err
	}
	out.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own() }
	return out, nil
}

// withoutPath keeps the cause of a file error and drops the path.
func withoutPath(err error) error {
	if path, ok := errors.AsType[*os.PathError](err); ok {
		return path.Err
	}
	return err
}
