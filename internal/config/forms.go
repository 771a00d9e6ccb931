package config

import (
	"crypto/x509"
	"encoding/pem"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxCABytes bounds what is read of a file with certificates; the roots of a
// whole operating system are a quarter of it.
const maxCABytes = 1 << 20

// form is a validator for texts, named by a `form` tag.
type form struct {
	allowed string
	check   func(string) error
}

// forms gives every form by its name.
func forms() map[string]form {
	return map[string]form{
		"url":      {"an http or https URL without user, password, query or fragment", checkURL},
		"pipeline": {"1 to 100 letters, digits, - and _", checkPipeline},
		"token":    {"visible ASCII characters without spaces", checkToken},
		"cafile":   {"a readable file with at least one PEM certificate, at most " + Size(maxCABytes).String(), checkCAFile},
		"keyfile":  {"a readable file with an unencrypted PEM key, at most " + Size(maxCABytes).String(), checkKeyFile},
		"tokenurl": {"an https URL without user, password, query or fragment; http for a host of this machine", checkTokenURL},
		"dsn":      {"postgres://user:password@host:port/database?option=value, or option=value pairs separated by spaces", checkDSN},
		"slot":     {"1 to 63 of a to z, 0 to 9 and _", checkSlot},
		"pgname":   {"1 to 63 bytes of UTF-8 without control characters", checkPGName},
		"brokers":  {"host:port, several separated by commas", checkBroker},
		"group":    {"1 to 249 bytes of UTF-8 without control characters", checkGroup},
		"topic":    {"1 to 249 of a to z, A to Z, 0 to 9, ., _ and -", checkTopic},
		"state":    {"file:/path, postgres:schema.table, none or auto", checkState},
		"text":     {"UTF-8 without control characters", checkPrintable},
		"spilldir": {"an absolute path without control characters, or off", checkSpillDir},
		"address":  {"host:port or :port, with a port from 0 to 65535", checkAddress},
	}
}

func checkSpillDir(text string) error {
	if text != Off && !filepath.IsAbs(text) {
		return wrong("is not an absolute path")
	}
	return checkPrintable(text)
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case !strings.Contains(text, "://"): // said before the parser finds a port in the scheme's place
		return wrong("does not begin with http:// or https://")
	case err != nil:
		return wrong("is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return wrong("does not begin with http:// or https://")
	case u.User != nil:
		// It would be printed with the configuration.
		return wrong("carries a user or password; secrets have settings of their own")
	case u.Hostname() == "":
		return wrong("has no host")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.HasSuffix(text, "#"):
		return wrong("has a query or a fragment")
	}
	return checkPrintable(text)
}

func isPlainHTTP(text string) bool {
	u, err := url.Parse(text)
	return err == nil && u.Scheme == "http"
}

func checkPipeline(text string) error {
	if len(text) > 100 || strings.ContainsFunc(text, func(c rune) bool {
		return c >= utf8.RuneSelf || (!unicode.IsLetter(c) && !unicode.IsDigit(c) && c != '-' && c != '_')
	}) {
		return wrong("is not a name that a pipeline can have")
	}
	return nil
}

func checkToken(text string) error {
	if strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c >= 0x7f }) {
		return wrong("has a character that cannot be sent in a header")
	}
	return nil
}

func checkCAFile(path string) error {
	text, err := readPEMFile(path)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(text) {
		return wrong("names a file without a PEM certificate")
	}
	return err
}

func checkKeyFile(path string) error {
	text, err := readPEMFile(path)
	if err != nil {
		return err
	}
	for len(text) > 0 {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		if strings.HasSuffix(block.Type, "PRIVATE KEY") {
			if strings.HasPrefix(block.Type, "ENCRYPTED") || block.Headers["DEK-Info"] != "" {
				return wrong("names a file with an encrypted key")
			}
			return nil
		}
		text = rest
	}
	return wrong("names a file without a PEM key")
}

// checkTokenURL keeps a secret from being sent in the clear over a network.
func checkTokenURL(text string) error {
	if err := checkURL(text); err != nil {
		return err
	}
	u, err := url.Parse(text)
	if err == nil && u.Scheme == "http" && u.Hostname() != "localhost" && !net.ParseIP(u.Hostname()).IsLoopback() {
		return wrong("would send the client's secret without TLS")
	}
	return nil
}

func readPEMFile(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, wrong("names a file that cannot be opened (%v)", withoutPath(err))
	}
	defer func() { _ = f.Close() }() // read only: nothing can be lost
	text, err := io.ReadAll(io.LimitReader(f, maxCABytes+1))
	switch {
	case err != nil:
		return nil, wrong("names a file that cannot be read (%v)", withoutPath(err))
	case len(text) > maxCABytes:
		return nil, wrong("names a file that is too large")
	}
	return text, nil
}

// checkDSN refuses what is plainly no connection string. The driver has the
// last word when it connects; it is not asked here because it reads files and
// variables of its own, and its errors quote the input.
func checkDSN(text string) error {
	if err := checkPrintable(text); err != nil {
		return err
	}
	for _, scheme := range []string{"postgres://", "postgresql://"} {
		rest, ok := strings.CutPrefix(text, scheme)
		if !ok {
			continue
		}
		if strings.ContainsAny(rest, " ") {
			return wrong("is a URL with a space in it; write it as %%20")
		}
		if _, err := url.PathUnescape(rest); err != nil {
			return wrong("is a URL with a %% that is not followed by two hexadecimal digits; write a %% as %%25")
		}
		if rest == "" {
			return wrong("is a URL without anything after the scheme")
		}
		return nil
	}
	if strings.Contains(text, "://") && !strings.Contains(text[:strings.Index(text, "://")], "=") {
		return wrong("is a URL of another kind")
	}
	return checkKeywords(text)
}

// checkKeywords walks a keyword/value string as libpq defines it: spaces may
// stand around =, values may stand in single quotes, \ escapes one character.
func checkKeywords(text string) error {
	rest, pairs := strings.TrimSpace(text), 0
	for rest != "" {
		key, after, found := strings.Cut(rest, "=")
		key = strings.TrimSpace(key)
		if !found || key == "" || strings.ContainsFunc(key, func(c rune) bool {
			return c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
		}) {
			return wrong("is neither a postgres URL nor a list of option=value")
		}
		var ok bool
		if rest, ok = skipKeywordValue(strings.TrimLeft(after, " \t")); !ok {
			return wrong("has a value with a quote or a backslash that is not finished")
		}
		rest = strings.TrimSpace(rest)
		pairs++
	}
	if pairs == 0 {
		return wrong("is empty")
	}
	return nil
}

// skipKeywordValue gives what follows the value that text begins with.
func skipKeywordValue(text string) (rest string, ok bool) {
	quoted := strings.HasPrefix(text, "'")
	start := 0
	if quoted {
		start = 1
	}
	for i := start; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\':
			if i++; i == len(text) {
				return "", false
			}
		case quoted && c == '\'':
			return text[i+1:], true
		case !quoted && (c == ' ' || c == '\t'):
			return text[i:], true
		}
	}
	return "", !quoted
}

func checkSlot(text string) error {
	if len(text) > maxPGName || strings.ContainsFunc(text, func(c rune) bool {
		return c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9')
	}) {
		return wrong("is not a name that a slot can have")
	}
	return nil
}

func checkPGName(text string) error {
	if len(text) > maxPGName {
		return wrong("is too long")
	}
	return checkPrintable(text)
}

func checkGroup(text string) error {
	if len(text) > maxTopicName {
		return wrong("is too long")
	}
	return checkPrintable(text)
}

func checkTopic(text string) error {
	if len(text) > maxTopicName || text == "." || text == ".." || strings.ContainsFunc(text, func(c rune) bool {
		return c >= utf8.RuneSelf || (!unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("._-", c))
	}) {
		return wrong("is not a name that a topic can have")
	}
	return nil
}

func checkPrintable(text string) error {
	if !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
		return wrong("has a control character or a byte that is not UTF-8")
	}
	return nil
}

func checkBroker(text string) error {
	host, port, err := net.SplitHostPort(text)
	switch {
	case strings.ContainsAny(text, "@/"):
		// A password here would be printed with the configuration.
		return wrong("is more than host and port")
	case err != nil || host == "":
		return wrong("is not host:port")
	}
	return checkPort(port, 1)
}

func checkAddress(text string) error {
	host, port, err := net.SplitHostPort(text)
	if err != nil || strings.ContainsAny(host, "@/ ") {
		return wrong("is not host:port")
	}
	return checkPort(port, 0)
}

func checkPort(port string, lowest uint64) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n < lowest {
		return wrong("has a port that is not a number from %d to 65535", lowest)
	}
	return nil
}
