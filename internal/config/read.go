package config

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"
)

// maxNameShown bounds how much of an unknown variable's name is repeated and
// compared.
const maxNameShown = 80

// reading is one pass over an environment.
type reading struct {
	settings []Setting
	values   map[string]reflect.Value // the Go field of each setting
	sources  map[string]Source
	faults   []Fault
	faulty   map[string]bool // names that have a fault already
	daemon   string          // whose settings are read
	// lost: a name is missing or unknown, so the list of names would help.
	lost bool
}

// read fills the groups (pointers to structs) from environ and collects the
// faults of single settings. The first prefix is that of the daemon. The error is a mistake in the tags, never in the
// environment.
func read(environ, prefixes []string, groups ...any) (*reading, error) {
	r := &reading{
		values:  map[string]reflect.Value{},
		sources: map[string]Source{},
		faulty:  map[string]bool{},
		daemon:  strings.ToLower(strings.TrimSuffix(prefixes[0], "_")),
	}
	byGroup := make([][]Setting, len(groups))
	for i, group := range groups {
		settings, err := settingsOf(group)
		if err != nil {
			return nil, err
		}
		byGroup[i] = settings
		r.settings = append(r.settings, settings...)
		for _, s := range settings {
			r.values[s.Name] = reflect.ValueOf(group).Elem().Field(s.index)
		}
	}
	variables := r.variables(environ, prefixes)
	given, files := r.resolve(variables)
	for i, group := range groups {
		if err := r.parse(group, byGroup[i], given); err != nil {
			return nil, err
		}
	}
	for _, s := range r.settings {
		value := r.values[s.Name]
		if r.faulty[s.Name] {
			continue
		}
		if err := s.check(value); err != nil {
			if err = r.refused(s, err); err != nil {
				return nil, err
			}
		} else if path, ok := files[s.Name]; ok {
			value.Set(reflect.ValueOf(fileSecret(s.Name+fileSuffix, path)))
		}
	}
	return r, nil
}

// variables picks the non-empty variables that belong to the daemon and
// reports those that no setting has.
func (r *reading) variables(environ, prefixes []string) map[string]string {
	known := map[string]bool{}
	var names []string
	for _, s := range r.settings {
		known[s.Name] = true
		names = append(names, s.Name)
		if s.Secret {
			known[s.Name+fileSuffix] = true
			names = append(names, s.Name+fileSuffix)
		}
	}
	variables, unknown := map[string]string{}, map[string]bool{}
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		prefix := prefixOf(name, prefixes)
		if prefix == "" {
			continue
		}
		if !known[name] {
			unknown[name] = unknown[name] || !isServiceLink(strings.TrimPrefix(name, prefix), value)
			continue
		}
		// Of two entries with one name the first counts, as in os.Getenv.
		if _, twice := variables[name]; !twice && value != "" {
			variables[name] = value
		}
	}
	for _, name := range sortedKeys(unknown) {
		if unknown[name] {
			r.unknown(name, prefixOf(name, prefixes), names)
		}
	}
	return variables
}

func prefixOf(name string, prefixes []string) string {
	for _, p := range prefixes {
		if strings.HasPrefix(name, p) {
			return p
		}
	}
	return ""
}

// unknown reports a variable that has one of our prefixes and is no setting.
func (r *reading) unknown(name, prefix string, names []string) {
	if base, ok := strings.CutSuffix(name, fileSuffix); ok && slices.Contains(names, base) {
		r.fault(Fault{name, "is unknown", "only secrets can be read from a file: set " + base})
		return
	}
	var candidates []string
	for _, n := range names {
		if suffix, ok := strings.CutPrefix(n, prefix); ok {
			candidates = append(candidates, suffix)
		}
	}
	shown := name
	if len(shown) > maxNameShown {
		shown = shown[:maxNameShown] + "…"
	}
	if strings.ContainsFunc(shown, func(c rune) bool { return c != '_' && (c < 'A' || c > 'Z') && (c < '0' || c > '9') }) {
		shown = strconv.Quote(shown)
	}
	what := "is unknown"
	if near := nearest(strings.TrimPrefix(name[:min(len(name), maxNameShown)], prefix), candidates); near != "" {
		what += "; did you mean " + prefix + near + "?"
	}
	r.lost = true
	r.fault(Fault{shown, what, ""})
}

// What Kubernetes puts into every container for each service of the namespace,
// here for a service whose name begins like one of our prefixes:
// FELDERA_SERVICE_HOST, FELDERA_PORT_8080_TCP_ADDR, … and FELDERA_PORT.
var (
	serviceLink     = regexp.MustCompile(`^(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)$`)
	servicePort     = regexp.MustCompile(`^(?:[A-Z0-9_]+_)?PORT$`)
	servicePortLink = regexp.MustCompile(`^(?:tcp|udp|sctp)://`)
)

// isServiceLink tells whether a variable was not written by a person. A bare
// PORT could have been, so its value must look like a link's too.
func isServiceLink(suffix, value string) bool {
	return serviceLink.MatchString(suffix) ||
		(servicePort.MatchString(suffix) && servicePortLink.MatchString(value))
}

// resolve reads the secrets' files. given has a text for every setting that
// the environment gives, files the path for those that came from a file.
func (r *reading) resolve(variables map[string]string) (given, files map[string]string) {
	given, files = map[string]string{}, map[string]string{}
	for _, s := range r.settings {
		text, direct := variables[s.Name]
		r.sources[s.Name] = SourceDefault
		if direct {
			given[s.Name] = text
			r.sources[s.Name] = SourceEnv
		}
		if !s.Secret {
			continue
		}
		fileName := s.Name + fileSuffix
		path, fromFile := variables[fileName]
		if !fromFile {
			continue
		}
		if direct {
			r.fault(Fault{s.Name, "is set and " + fileName + " too", "one of the two"})
			r.faulty[s.Name] = true
			continue
		}
		text, err := readSecretFile(path)
		if err != nil {
			r.fault(Fault{fileName, "names a file that " + err.Error(), "a readable file that holds the secret and nothing else"})
			r.faulty[s.Name] = true
			continue
		}
		given[s.Name], files[s.Name] = text, path
		r.sources[s.Name] = SourceFile
	}
	return given, files
}

// parse lets caarlos0/env fill one group and rewrites its errors, which quote
// values. One group at a time, because they name the Go field and no more.
func (r *reading) parse(group any, settings []Setting, given map[string]string) error {
	own := make(map[string]string, len(settings))
	for _, s := range settings {
		if text, ok := given[s.Name]; ok {
			own[s.Name] = text
		}
	}
	err := env.ParseWithOptions(group, env.Options{Environment: own, FuncMap: parsers()})
	if err == nil {
		return nil
	}
	all, ok := errors.AsType[env.AggregateError](err)
	if !ok {
		return fmt.Errorf("read the settings of %T: unexpected %T", group, err)
	}
	for _, one := range all.Errors {
		if unset, ok := errors.AsType[env.VarIsNotSetError](one); ok {
			i := slices.IndexFunc(settings, func(s Setting) bool { return s.Name == unset.Key })
			if i >= 0 && !r.faulty[unset.Key] {
				r.lost = true
				_ = r.refused(settings[i], wrong("is not set")) // an invalid: always nil
			}
			continue
		}
		parse, ok := errors.AsType[env.ParseError](one)
		i := slices.IndexFunc(settings, func(s Setting) bool { return s.field == parse.Name })
		if !ok || i < 0 {
			return fmt.Errorf("read the settings of %T: unexpected %T", group, one)
		}
		if r.faulty[settings[i].Name] {
			continue
		}
		if err := r.refused(settings[i], parse.Err); err != nil {
			_ = r.refused(settings[i], wrong("cannot be read")) // an invalid: always nil
		}
	}
	return nil
}

// parsers are used instead of those of caarlos0/env, by type.
func parsers() map[reflect.Type]env.ParserFunc {
	return map[reflect.Type]env.ParserFunc{
		reflect.TypeFor[bool](): func(text string) (any, error) {
			if text != "true" && text != "false" {
				return nil, wrong("is neither true nor false")
			}
			return text == "true", nil
		},
		reflect.TypeFor[int](): func(text string) (any, error) {
			n, err := strconv.Atoi(text)
			if err != nil {
				return nil, wrong("is not a whole number")
			}
			return n, nil
		},
		reflect.TypeFor[time.Duration](): func(text string) (any, error) { return parseDuration(text) },
		reflect.TypeFor[Size]():          func(text string) (any, error) { return parseSize(text) },
		reflect.TypeFor[[]string]():      func(text string) (any, error) { return parseList(text) },
	}
}

// parseList cuts a text at its commas. White space around an entry is not part
// of it; no entry is empty or there twice.
func parseList(text string) ([]string, error) {
	list := strings.Split(text, ",")
	for i := range list {
		list[i] = strings.TrimSpace(list[i])
		if list[i] == "" {
			return nil, wrong("has nothing in entry %d", i+1)
		}
		if first := slices.Index(list[:i], list[i]); first >= 0 {
			return nil, wrong("has the same in entries %d and %d", first+1, i+1)
		}
	}
	return list, nil
}

// refused records err as a fault of s if it is an invalid, else gives it back.
func (r *reading) refused(s Setting, err error) error {
	bad, ok := errors.AsType[*invalid](err)
	if !ok {
		return err
	}
	f := Fault{Name: s.Name, Wrong: bad.wrong, Allowed: bad.allowed}
	if f.Allowed == "" {
		f.Allowed = s.Allowed()
	}
	if f.Wrong == "is not set" && s.Example != "" {
		f.Allowed += ", such as " + s.Example
	}
	if s.Secret && f.Wrong == "is not set" {
		f.Wrong += ", and " + s.Name + fileSuffix + " is not either"
	}
	r.fault(f)
	r.faulty[s.Name] = true
	return nil
}

// require records a fault of name unless ok holds. Nothing is said when name
// or one of the others it depends on has a fault already: their values mean
// nothing then.
func (r *reading) require(ok bool, name, what, allowed string, others ...string) {
	if ok || r.faulty[name] || slices.ContainsFunc(others, func(o string) bool { return r.faulty[o] }) {
		return
	}
	r.fault(Fault{name, what, allowed})
	r.faulty[name] = true
}

func (r *reading) fault(f Fault) { r.faults = append(r.faults, f) }

// finish gives the effective table, or all the faults in the order of the
// settings.
func (r *reading) finish() (Effective, error) {
	if len(r.faults) > 0 {
		rank := map[string]int{}
		for i, s := range r.settings {
			rank[s.Name], rank[s.Name+fileSuffix] = i, i
		}
		place := func(f Fault) int {
			if i, ok := rank[f.Name]; ok {
				return i
			}
			return len(r.settings)
		}
		slices.SortStableFunc(r.faults, func(a, b Fault) int { return place(a) - place(b) })
		faults := &Faults{List: r.faults}
		if r.lost {
			faults.Hint = "`" + r.daemon + " run -help` lists all settings"
		}
		return Effective{}, faults
	}
	e := Effective{rows: make([]Row, len(r.settings))}
	for i, s := range r.settings {
		e.rows[i] = Row{Name: s.Name, Value: show(r.values[s.Name]), Source: r.sources[s.Name], Secret: s.Secret}
	}
	return e, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
