package wal

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"holdfast/internal/decode"
)

// This file is what the state keeps of a table's baseline, so that the next
// process can hold the catalogue against it: what changed while no pgsource ran
// is in no stream, and a process that knows the tables only as it finds them
// would go on in silence. What is kept is short, since the state is saved at
// each acknowledgement: hashes in place of texts, so a message can say what is
// now, and not always what was.
//
// It is a line of tokens with blanks between them, sorted:
//
//	c<name>=<number>[f][p][:<expression>]  a column; f: the Feldera table has it, p: the publication does
//	w<filter>                              the row filter, where there is one
//	r:<publication>/<oid>/<list>           the table's place in the publication, where it is there by name, with its column list
//	e<oid>=<n>:<labels>                    the n labels of an enum, in the order of their making
//	m<oid>:<attributes>                    a composite type
//	s<oid><setting>:<value>                a setting that decides how values of a type read
//	l<oid>, d<oid>                         a leaf partition, one that is divided further
//
// where what stands for a text is its hash.

// hashed stands for a text: 48 bits tell the few thousand names of a table apart.
func hashed(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return base64.RawURLEncoding.EncodeToString(sum[:6])
}

// remembered gives the line for a table as it is.
func (b *baseline) remembered() string {
	var tokens []string
	for name, col := range b.columns {
		t := "c" + hashed(name) + "=" + strconv.Itoa(int(col.number))
		if col.has {
			t += "f"
		}
		if col.carried {
			t += "p"
		}
		if col.generated != "" {
			t += ":" + hashed(col.generated)
		}
		tokens = append(tokens, t)
	}
	if b.filter != "" {
		tokens = append(tokens, "w"+hashed(b.filter))
	}
	if b.entry.number != 0 {
		tokens = append(tokens, "r:"+b.entry.token())
	}
	for typ, enum := range b.enums() {
		tokens = append(tokens, fmt.Sprintf("e%d=%d:%s", typ, len(enum.labels), hashed(enum.labels...)))
	}
	for of, text := range b.texts {
		switch of.class {
		case classEnum:
		case classComposite:
			tokens = append(tokens, fmt.Sprintf("m%d:%s", of.typ, hashed(text)))
		default:
			tokens = append(tokens, fmt.Sprintf("s%d%s:%s", of.typ, hashed(of.class), hashed(text)))
		}
	}
	for _, p := range b.parts {
		tokens = append(tokens, partToken(&p))
	}
	slices.Sort(tokens)
	return strings.Join(slices.Compact(tokens), " ")
}

func (e entry) token() string {
	return fmt.Sprintf("%d/%d/%s", e.publication, e.number, hashed(e.list))
}

// putBackSince is putBack for what a line has of a place; an older one has none.
func (e entry) putBackSince(token string) bool {
	var was entry
	var list string
	if n, err := fmt.Sscanf(token, "%d/%d/%s", &was.publication, &was.number, &list); n != 3 || err != nil || list != hashed(e.list) {
		return false
	}
	was.list = e.list
	return was.putBack(e)
}

// enum is one with its labels in the order in which they were made: ADD VALUE
// leaves those before it where they are.
type enum struct {
	name   string
	labels []string
}

func (b *baseline) enums() map[uint32]*enum {
	found := make(map[uint32]*enum)
	for _, of := range slices.SortedFunc(maps.Keys(b.texts), func(x, y textOf) int { return cmp.Compare(x.oid, y.oid) }) {
		if of.class != classEnum {
			continue
		}
		if found[of.typ] == nil {
			found[of.typ] = &enum{name: of.name}
		}
		found[of.typ].labels = append(found[of.typ].labels, b.texts[of])
	}
	return found
}

func partToken(p *partition) string {
	class := "d"
	if p.leaf {
		class = "l"
	}
	return class + strconv.FormatUint(uint64(p.oid), 10)
}

// since holds a table as it is against the line of a process before. changed
// are the reasons for which rows may be others at the source than what was
// delivered of them, and the columns that older rows lack are added.
func (b *baseline) since(line string) (changed, added []string) {
	if line == "" {
		return nil, nil // nothing is known of it
	}
	was := make(map[string]string)
	for token := range strings.FieldsSeq(line) {
		key, rest, _ := strings.Cut(token, "=")
		if token[0] != 'c' && token[0] != 'e' {
			key, rest, _ = strings.Cut(token, ":")
		}
		was[key] = rest
	}
	numbers := make(map[string]bool)
	for key, rest := range was {
		if strings.HasPrefix(key, "c") {
			number, _, _ := strings.Cut(rest, ":")
			numbers[strings.TrimRight(number, "fp")] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.columns)) {
		col := b.columns[name]
		if !col.has {
			continue
		}
		old, known := was["c"+hashed(name)]
		marks, expression, _ := strings.Cut(old, ":")
		number := strings.TrimRight(marks, "fp")
		switch {
		case !known && (col.filled || numbers[strconv.Itoa(int(col.number))]): // of another name before
			added = append(added, name)
		case !known:
		case number != strconv.Itoa(int(col.number)):
			changed = append(changed, fmt.Sprintf("column %q is another one than it was: it was dropped and made anew, or names of columns were exchanged", name))
		case !strings.Contains(marks, "f"):
			added = append(added, name)
		case strings.Contains(marks, "p") && !col.carried:
			changed = append(changed, fmt.Sprintf("the publication's column list leaves out column %q now, so it is NULL in the Feldera table in every row that changes", name))
		case !strings.Contains(marks, "p") && col.carried:
			added = append(added, name)
		case expression != "" && col.generated != "" && expression != hashed(col.generated):
			changed = append(changed, fmt.Sprintf("the generated column %q has another expression", name))
		}
	}
	return append(changed, b.othersSince(was)...), added
}

// othersSince is since for what is no column.
func (b *baseline) othersSince(was map[string]string) (changed []string) {
	filtered := slices.ContainsFunc(slices.Collect(maps.Keys(was)), func(key string) bool { return strings.HasPrefix(key, "w") })
	if _, same := was["w"+hashed(b.filter)]; (b.filter != "" || filtered) && !same {
		changed = append(changed, fmt.Sprintf("the publication's row filter is now %s and was another: rows that only one of the two lets through are not in the stream", orNone(b.filter)))
	}
	for typ, enum := range b.enums() {
		// A type that was made anew has other labels, and the columns were rewritten
		// to them, row by row.
		old, known := was[fmt.Sprintf("e%d", typ)]
		count, labels, _ := strings.Cut(old, ":")
		n, err := strconv.Atoi(count)
		if known && (err != nil || n < 0 || n > len(enum.labels) || hashed(enum.labels[:n]...) != labels) {
			changed = append(changed, fmt.Sprintf("labels of type %s were renamed", enum.name))
		}
	}
	for of, text := range b.texts {
		switch of.class {
		case classEnum:
		case classComposite:
			if old, known := was[fmt.Sprintf("m%d", of.typ)]; known && old != hashed(text) {
				changed = append(changed, fmt.Sprintf("the composite type %s has other attributes", of.name))
			}
		default:
			if old, known := was[fmt.Sprintf("s%d%s", of.typ, hashed(of.class))]; known && old != hashed(text) {
				changed = append(changed, fmt.Sprintf("values of type %s are written by %s, which is now %s and was another", of.name, of.class, strconv.Quote(text)))
			}
		}
	}
	slices.Sort(changed)
	// Another filter is another place: that is said then.
	if _, same := was["w"+hashed(b.filter)]; same == (b.filter != "") && same == filtered && b.entry.putBackSince(was["r"]) {
		changed = append(changed, whyPutBack)
	}
	return changed
}

// wasCarried tells whether a line has a column that both the publication and the
// Feldera table had.
func wasCarried(line, column string) bool {
	prefix := "c" + hashed(column) + "="
	for token := range strings.FieldsSeq(line) {
		if rest, is := strings.CutPrefix(token, prefix); is {
			marks, _, _ := strings.Cut(rest, ":")
			return strings.HasSuffix(marks, "fp")
		}
	}
	return false
}

// partsSince names leaf partitions that went, and partitions that came with rows.
// One that was made as a partition had none, and what was written to it since is
// in the stream.
func (b *baseline) partsSince(line string) (changed []string) {
	if line == "" {
		return nil
	}
	was := make(map[string]bool)
	for token := range strings.FieldsSeq(line) {
		was[token] = true
	}
	now := make(map[string]bool, len(b.parts))
	for _, p := range b.parts {
		now[partToken(&p)] = true
		if !p.made && !was[partToken(&p)] {
			changed = append(changed, fmt.Sprintf("partition %s was attached, and rows that were in it before are not part of the stream", p.name))
		}
	}
	gone := 0
	for token := range was {
		if token[0] == 'l' && !now[token] {
			gone++
		}
	}
	if gone > 0 {
		changed = append(changed, fmt.Sprintf("%d of its leaf partitions were detached or dropped, and their rows stay in Feldera", gone))
	}
	slices.Sort(changed)
	return changed
}

// meanwhile is what became of the mapped tables while no pgsource ran.
type meanwhile struct {
	// anew are other tables of the same name, changed those whose rows are others,
	// each with its reasons. added are columns that rows from before lack.
	anew           []tableName
	changed, added []tableAnd
}

type tableAnd struct {
	table tableName
	what  string
}

// identify compares the tables with what the state knows of them, and takes
// them as they are now.
func (st *snapshotState) identify(r *ready, ignorePartitions bool) *meanwhile {
	var m meanwhile
	for i := range st.Tables {
		t := &st.Tables[i]
		name := tableName{t.Schema, t.Name}
		oid, now := r.oids[name], r.baselines[name]
		if oid == 0 || now == nil {
			continue
		}
		if t.OID != 0 && t.OID != oid {
			m.anew = append(m.anew, name)
		} else {
			changed, added := now.since(t.Shape)
			if !ignorePartitions {
				changed = append(changed, now.partsSince(t.Shape)...)
			}
			if len(changed) > 0 {
				m.changed = append(m.changed, tableAnd{name, strings.Join(changed, "; ")})
			}
			if len(added) > 0 && st.copyOf(name) == nil { // its copy begins again with them
				m.added = append(m.added, tableAnd{name, whyAdded(added)})
			}
		}
		t.OID, t.Shape = oid, now.remembered()
	}
	return &m
}

// whyAdded is why rows differ in columns that came later than they did.
func whyAdded(columns []string) string {
	const most = 20
	names := make([]string, 0, len(columns))
	for i, name := range columns {
		if i == most {
			names = append(names, fmt.Sprintf("and %d more", len(columns)-most))
			break
		}
		names = append(names, strconv.Quote(name))
	}
	return "columns " + strings.Join(names, ", ") + " came later than rows that are there, and can have a value in them at the source (a DEFAULT, or what was there under another name, or before the Feldera table had them) that the stream does not bring"
}

// note enters all of it into the state.
func (m *meanwhile) note(to *State) {
	for _, t := range m.added {
		to.differ(t.what, t.table)
	}
	for _, t := range m.changed {
		to.differ(t.what, t.table)
	}
	if len(m.anew) > 0 {
		to.differ(whyAnew, m.anew...)
	}
}

// say logs what is no reason to stop.
func (m *meanwhile) say(ctx context.Context, s *Source) {
	for _, t := range m.added {
		s.sayAdded(ctx, t.table, t.what)
	}
	if len(m.added)+len(m.changed)+len(m.anew) > 0 {
		if st, err := s.keeper.get(ctx); err == nil && st != nil {
			s.reportNotices(st)
		}
	}
}

func (s *Source) sayAdded(ctx context.Context, name tableName, why string) {
	s.log.WarnContext(ctx, "older rows of a table lack what the source has in them now", "table", name.String(), "why", why, "run", "pgsource resync "+name.schema+"."+name.name)
}

const whyAnew = "it was dropped, and another one made of its name, since pgsource ran last: its rows are in Feldera beside those of the new one, which may have had rows before it was published"

// refusal ends one start: the state has the tables as they are now then, and
// says of them that they differ. nil where there is no reason to.
func (m *meanwhile) refusal() error {
	list := slices.Clone(m.changed)
	for _, t := range m.anew {
		list = append(list, tableAnd{t, whyAnew})
	}
	if len(list) == 0 {
		return nil
	}
	const most = 20
	names, why, run := make([]string, 0, most), make([]string, 0, most), "pgsource resync"
	for i, t := range list {
		if i == most {
			names, run = append(names, fmt.Sprintf("and %d more", len(list)-most)), "pgsource resync -all"
			break
		}
		names, run = append(names, t.table.String()), run+" "+t.table.schema+"."+t.table.name
		what := cutOff(t.what)
		if len(list) > 1 {
			what = t.table.String() + ": " + what
		}
		why = append(why, what)
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "source table", Where: strings.Join(names, ", "),
		Why:      strings.Join(why, "; ") + "; this happened while no pgsource ran",
		Expected: "the tables that pgsource had when it ran last",
		Do:       "start pgsource again, which goes on with what is there now, then run: " + run,
	}
}
