package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/riferrei/srclient"

	"holdfast/internal/decode"
)

const (
	// maxAnswer bounds one answer of the registry.
	maxAnswer = 2 << 20
	// maxReferences bounds the schemas that one schema needs, and
	// maxReferenceDepth how far they are apart.
	maxReferences     = 256
	maxReferenceDepth = 16
	// maxSaid bounds what is quoted of an answer.
	maxSaid = 200

	// The registry's own codes for "no such subject, version or schema". A 404
	// without one of them comes from something else than a registry.
	codeNoSubject, codeNoVersion, codeNoSchema = 40401, 40402, 40403
)

// errNotFound is the registry's answer that it has no such schema.
var errNotFound = errors.New("the registry has no such schema")

// ask makes one attempt to get a schema with all that it refers to. It gives
// errNotFound, a *decode.Refusal where what the registry has can never be used,
// or any other error where it could not be asked.
func (r *Registry) ask(ctx context.Context, ref decode.SchemaRef) (*decode.AvroSchema, error) {
	a := r.attempt(ctx)
	if err := a.authorize(); err != nil {
		return nil, err
	}
	text, kind, references, err := a.schema(ref)
	if err != nil {
		return nil, a.explain(err)
	}
	if kind != "" && kind != string(srclient.Avro) {
		return nil, &decode.Refusal{
			Reason: decode.ReasonUnsupported, Why: fmt.Sprintf("it was written with %s, which is of the type %.20q", ref, kind), Expected: "a schema of the type AVRO",
			Do: "take the topic out of KAFKASINK_TOPICS, or have it written in Avro or JSON",
		}
	}
	if err := a.resolve(references, 0); err != nil {
		return nil, a.explain(err)
	}
	schema, err := decode.ParseAvro(text, a.texts...)
	if err != nil {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSchema, Why: fmt.Sprintf("it was written with %s: %v", ref, err), Expected: "a valid Avro schema",
		}
	}
	return schema, nil
}

func (r *Registry) attempt(ctx context.Context) *attempt {
	a := &attempt{r: r, ctx: ctx, seen: make(map[string]bool)}
	// A client of its own for each attempt: it takes no context, keeps what it
	// read for ever, and loses the status of an answer that is no JSON.
	a.client = srclient.NewSchemaRegistryClient(r.cfg.URL, srclient.WithClient(&http.Client{Timeout: r.cfg.Timeout, Transport: a}))
	a.client.CachingEnabled(false)
	a.client.CodecCreationEnabled(false)
	return a
}

// attempt is one attempt. It is also the transport of its requests.
type attempt struct {
	r      *Registry
	ctx    context.Context //nolint:containedctx // the library's methods take none
	client *srclient.SchemaRegistryClient
	user   string
	secret string
	bearer string
	status int // of the last answer

	seen  map[string]bool // subjects and versions
	texts []string        // of what is referred to, in order of need
}

// authorize reads the secrets.
func (a *attempt) authorize() error {
	cfg := &a.r.cfg
	var err error
	switch {
	case cfg.Token != nil:
		if a.bearer, err = cfg.Token(); err != nil {
			return fmt.Errorf("read the registry's token: %w", err)
		}
		a.client.SetBearerToken(a.bearer)
	case cfg.Password != nil:
		a.user = cfg.User
		if a.secret, err = cfg.Password(); err != nil {
			return fmt.Errorf("read the registry's password: %w", err)
		}
		a.client.SetCredentials(a.user, a.secret)
	}
	return nil
}

// RoundTrip sends a request under the attempt's context, and bounds its answer.
func (a *attempt) RoundTrip(req *http.Request) (*http.Response, error) {
	// The client's own time-out lives in the request's context: keep it.
	ctx, cancel := context.WithCancel(req.Context())
	stop := context.AfterFunc(a.ctx, cancel) //nolint:contextcheck // both contexts end the request
	resp, err := a.r.http.Transport.RoundTrip(req.WithContext(ctx))
	if err != nil {
		stop()
		cancel()
		return nil, fmt.Errorf("ask the registry: %w", err)
	}
	a.status = resp.StatusCode
	resp.Body = &bounded{ReadCloser: resp.Body, left: maxAnswer, end: func() { stop(); cancel() }}
	return resp, nil
}

// bounded is a body that ends with an error when it is too large.
type bounded struct {
	io.ReadCloser
	left int
	end  func()
}

var errTooLarge = fmt.Errorf("the registry's answer is larger than %d bytes", maxAnswer)

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLarge
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err //nolint:wrapcheck // a reader hands errors on as they are
}

func (b *bounded) Close() error {
	defer b.end()
	return b.ReadCloser.Close() //nolint:wrapcheck // see above
}

// schema gets the text of one schema.
func (a *attempt) schema(ref decode.SchemaRef) (text, kind string, references []srclient.Reference, err error) {
	if ref.Kind == decode.SchemaGUID {
		return a.byGUID(ref)
	}
	s, err := a.client.GetSchema(int(ref.ID))
	if err != nil {
		return "", "", nil, fmt.Errorf("get %s: %w", ref, err)
	}
	return a.whole(s)
}

func (a *attempt) whole(s *srclient.Schema) (text, kind string, references []srclient.Reference, err error) {
	if s.SchemaType() != nil {
		kind = string(*s.SchemaType())
	}
	if s.Schema() == "" {
		return "", "", nil, errors.New("the registry's answer has no schema in it")
	}
	return s.Schema(), kind, s.References(), nil
}

// byGUID gets a schema by its GUID, which the library does not know of.
func (a *attempt) byGUID(ref decode.SchemaRef) (text, kind string, references []srclient.Reference, err error) {
	body, err := a.get("/schemas/guids/" + url.PathEscape(ref.GUIDText()))
	if err != nil {
		return "", "", nil, fmt.Errorf("get %s: %w", ref, err)
	}
	var answer struct {
		Schema     string               `json:"schema"`
		SchemaType string               `json:"schemaType"`
		References []srclient.Reference `json:"references"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return "", "", nil, fmt.Errorf("get %s: the answer is no JSON: %w", ref, err)
	}
	if answer.Schema == "" {
		return "", "", nil, fmt.Errorf("get %s: the registry's answer has no schema in it", ref)
	}
	return answer.Schema, answer.SchemaType, answer.References, nil
}

// get gets what the library has no method for.
func (a *attempt) get(path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(a.ctx, http.MethodGet, a.r.cfg.URL+path, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	switch {
	case a.bearer != "":
		req.Header.Set("Authorization", "Bearer "+a.bearer)
	case a.secret != "":
		req.SetBasicAuth(a.user, a.secret)
	}
	client := http.Client{Timeout: a.r.cfg.Timeout, Transport: a}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the request
	}
	defer func() { _ = resp.Body.Close() }() // read only: nothing can be lost
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		var said srclient.Error
		if json.Unmarshal(body, &said) == nil && said.Code != 0 {
			return nil, coded{said.Code, said.Message}
		}
		return nil, errors.New(resp.Status)
	}
	return body, nil
}

// coded is the registry's own error. The library's cannot be made outside of
// it.
type coded struct {
	code    int
	message string
}

func (c coded) Error() string { return fmt.Sprintf("%.*s (%d)", maxSaid, c.message, c.code) }

// resolve gets what a schema refers to, each after what it needs itself. A
// schema that is referred to twice is got once, and a circle ends so.
func (a *attempt) resolve(references []srclient.Reference, level int) error {
	for _, ref := range references {
		name := fmt.Sprintf("%s/%d", ref.Subject, ref.Version)
		if a.seen[name] {
			continue
		}
		if a.seen[name] = true; len(a.seen) > maxReferences || level >= maxReferenceDepth {
			return &decode.Refusal{
				Reason: decode.ReasonLimit, Why: fmt.Sprintf("its schema refers to more than %d others, or over more than %d steps", maxReferences, maxReferenceDepth),
			}
		}
		s, err := a.client.GetSchemaByVersion(ref.Subject, ref.Version)
		if err != nil {
			return fmt.Errorf("get version %d of the subject %.100q, which the schema refers to: %w", ref.Version, ref.Subject, err)
		}
		text, _, more, err := a.whole(s)
		if err != nil {
			return err
		}
		if err := a.resolve(more, level+1); err != nil {
			return err
		}
		a.texts = append(a.texts, text)
	}
	return nil
}

// explain tells "there is none" from "it could not be asked", and bounds what
// is said. The status that the library loses was kept by the transport.
func (a *attempt) explain(err error) error {
	if err == nil {
		return nil
	}
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		return err
	}
	code := 0
	var said srclient.Error
	var own coded
	switch {
	case errors.As(err, &said):
		code = said.Code
	case errors.As(err, &own):
		code = own.code
	}
	text := err.Error()
	if len(text) > 2*maxSaid {
		text = text[:2*maxSaid] + "…"
	}
	text = string(bytes.ToValidUTF8([]byte(text), []byte("?")))
	switch {
	case a.status == http.StatusNotFound && (code == codeNoSubject || code == codeNoVersion || code == codeNoSchema):
		return fmt.Errorf("%w: %s", errNotFound, text)
	case a.status == http.StatusUnauthorized || a.status == http.StatusForbidden:
		return fmt.Errorf("the registry does not let this user in (status %d; see KAFKASINK_REGISTRY_USER, _PASSWORD and _TOKEN): %s", a.status, text)
	case a.status == 0:
		return errors.New(text)
	}
	return fmt.Errorf("the registry answered with status %d: %s", a.status, text)
}
