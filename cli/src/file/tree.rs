//! Parses YAML to a JSON value with the position of every field. Accepts a single document with
//! unique string keys.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};
use serde_saphyr::granit_parser::{Event, Marker, Options, Parser, ScalarStyle, ScanError, Span};
use stoker_api::validate::{item, member, shortened};

use super::Problem;
use super::scalar::{Scalar, resolve};

/// Maximum number of values, including those repeated by aliases, which can grow exponentially.
const NODES_MAX: usize = 100_000;
/// Maximum nesting depth, which bounds the stack.
const DEPTH_MAX: usize = 64;

/// Position in a file; line and column count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// Parsed document.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    /// Value of the document.
    pub(super) value: Value,
    /// Position of each field, by path; `None` for fields from `--set`.
    pub(super) positions: BTreeMap<String, Option<Position>>,
    /// Path of the original of each field, if the tree is translated from another format.
    pub(super) origins: BTreeMap<String, String>,
}

impl Tree {
    /// Returns the original path of the field at `path`, or of the innermost field that contains
    /// it. Without one, returns `path`.
    pub(super) fn original<'a>(&'a self, path: &'a str) -> &'a str {
        let mut inner = path;
        loop {
            if let Some(origin) = self.origins.get(inner) {
                return origin;
            }
            let Some(end) = inner.rfind(['.', '[']) else { return path };
            inner = &inner[..end];
        }
    }

    /// Returns the position of the field at `path`, or of the innermost field that contains it.
    pub(super) fn position(&self, path: &str) -> Option<Position> {
        let mut path = path;
        loop {
            if let Some(position) = self.positions.get(path) {
                return *position;
            }
            let end = path.rfind(['.', '[']).unwrap_or(0);
            if path.is_empty() {
                return None;
            }
            path = &path[..end];
        }
    }

    /// Copies the positions of `from` and its fields in `source` to `to`, which has this origin.
    pub(super) fn copy_positions(&mut self, source: &Self, from: &str, to: &str) {
        for (path, position) in source.positions.range(from.to_owned()..) {
            let Some(rest) = path.strip_prefix(from) else { break };
            if rest.is_empty() || rest.starts_with(['.', '[']) {
                self.positions.insert(format!("{to}{rest}"), *position);
                self.origins.insert(format!("{to}{rest}"), path.clone());
            }
        }
    }
}

/// Parses one document. A returned tree is usable even if there are problems.
pub(super) fn read(text: &str) -> (Option<Tree>, Vec<Problem>) {
    let mut options = Options::default();
    // The default depends on cargo features of other crates.
    options.set_emit_comments(false);
    let mut reader = Reader {
        parser: Parser::new_from_str_with_options(text, options),
        anchors: HashMap::new(),
        problems: Vec::new(),
        num_nodes: 0,
    };
    let tree = reader.document().unwrap_or_else(|stop| {
        reader.problems.push(*stop);
        None
    });
    (tree, reader.problems)
}

struct Reader<'a> {
    parser: Parser<'a, serde_saphyr::granit_parser::StrInput<'a>>,
    /// Value of each anchor, by its ID.
    anchors: HashMap<usize, Value>,
    problems: Vec<Problem>,
    num_nodes: usize,
}

/// Problem after which the rest of the file cannot be parsed.
type FatalProblem = Box<Problem>;

impl<'a> Reader<'a> {
    fn document(&mut self) -> Result<Option<Tree>, FatalProblem> {
        let mut tree = None;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => {
                    if tree.is_none() && self.problems.is_empty() {
                        let rule = "the file is empty; write an Experiment or an InferenceJob";
                        let start = Position { line: 1, column: 1 };
                        self.problems.push(Problem::at(start, "", "", rule));
                    }
                    return Ok(tree);
                }
                Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
                _ if tree.is_some() => {
                    let rule = "a second document is not allowed; write one object per file";
                    self.problems.push(Problem::at(position(&span.start), "", "", rule));
                    return Ok(tree);
                }
                event => {
                    let mut positions = BTreeMap::new();
                    positions.insert(String::new(), Some(position(&span.start)));
                    let value = self.node(event, &span, "", 0, &mut positions)?;
                    tree = Some(Tree { value, positions, ..Tree::default() });
                }
            }
        }
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), FatalProblem> {
        match self.parser.next_event() {
            None => Ok((Event::StreamEnd, Span::default())),
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(Box::new(syntax_problem(&error))),
        }
    }

    fn refuse(&mut self, span: &Span, path: &str, value: &str, rule: &str) {
        self.problems.push(Problem::at(position(&span.start), path, value, rule));
    }

    fn node(
        &mut self,
        event: Event<'a>,
        span: &Span,
        path: &str,
        depth: usize,
        positions: &mut BTreeMap<String, Option<Position>>,
    ) -> Result<Value, FatalProblem> {
        self.count(span, 1)?;
        if depth > DEPTH_MAX {
            let rule = format!("must not be nested deeper than {DEPTH_MAX} levels");
            return Err(Box::new(Problem::at(position(&span.start), path, "", &rule)));
        }
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let kind = tag.as_ref().map(|tag| tag.core_suffix());
                let is_string = style != ScalarStyle::Plain || kind == Some(Some("str"));
                match kind {
                    None | Some(Some("str")) => {}
                    // kubectl converts `!!int "3"` to a number.
                    Some(Some(_)) => {
                        let rule = "only the tag !!str is supported; remove the tag";
                        self.refuse(span, path, &text, rule);
                    }
                    Some(None) => {
                        let rule = "custom tags are not supported; remove the tag";
                        self.refuse(span, path, &text, rule);
                    }
                }
                (self.scalar(&text, is_string, span, path), anchor)
            }
            Event::SequenceStart(_, anchor, _) => {
                (Value::Array(self.list(path, depth, positions)?), anchor)
            }
            Event::MappingStart(_, anchor, _) => {
                (Value::Object(self.map(path, depth, positions)?), anchor)
            }
            Event::Alias(id) => {
                let Some(value) = self.anchors.get(&id).cloned() else {
                    self.refuse(span, path, "", "an alias must not be inside the value it repeats");
                    return Ok(Value::Null);
                };
                self.count(span, size(&value))?;
                (value, 0)
            }
            _ => {
                return Err(Box::new(Problem::at(
                    position(&span.start),
                    path,
                    "",
                    "a value is missing",
                )));
            }
        };
        if anchor != 0 {
            self.anchors.insert(anchor, value.clone());
        }
        Ok(value)
    }

    fn count(&mut self, span: &Span, nodes: usize) -> Result<(), FatalProblem> {
        self.num_nodes += nodes;
        if self.num_nodes <= NODES_MAX {
            return Ok(());
        }
        let rule = format!("the file must not have more than {NODES_MAX} values");
        Err(Box::new(Problem::at(position(&span.start), "", "", &rule)))
    }

    fn scalar(&mut self, text: &str, is_string: bool, span: &Span, path: &str) -> Value {
        if is_string {
            return Value::from(text);
        }
        match resolve(text) {
            Scalar::Value(value) => value,
            Scalar::Refused(rule) => {
                self.refuse(span, path, text, rule);
                Value::from(text)
            }
        }
    }

    fn list(
        &mut self,
        path: &str,
        depth: usize,
        positions: &mut BTreeMap<String, Option<Position>>,
    ) -> Result<Vec<Value>, FatalProblem> {
        let mut values = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(values);
            }
            let path = item(path, values.len());
            positions.insert(path.clone(), Some(position(&span.start)));
            values.push(self.node(event, &span, &path, depth + 1, positions)?);
        }
    }

    fn map(
        &mut self,
        path: &str,
        depth: usize,
        positions: &mut BTreeMap<String, Option<Position>>,
    ) -> Result<Map<String, Value>, FatalProblem> {
        let mut members: Map<String, Value> = Map::new();
        loop {
            let (event, key_span) = self.next()?;
            if event == Event::MappingEnd {
                return Ok(members);
            }
            let Some(key) = self.key(event, &key_span, path, depth)? else {
                let (event, span) = self.next()?;
                self.node(event, &span, path, depth + 1, &mut BTreeMap::new())?;
                continue;
            };
            let path = member(path, &key);
            let (event, span) = self.next()?;
            if members.contains_key(&key) {
                let first = positions.get(&path).copied().flatten();
                let line = first.map_or(0, |position| position.line);
                let rule = format!("duplicate key, first in line {line}; remove one");
                let value = self.node(event, &span, &path, depth + 1, &mut BTreeMap::new())?;
                self.refuse(&key_span, &path, &shortened(&value), &rule);
                continue;
            }
            positions.insert(path.clone(), Some(position(&key_span.start)));
            let value = self.node(event, &span, &path, depth + 1, positions)?;
            members.insert(key, value);
        }
    }

    /// Parses a key and reports a problem unless it is a string. Returns `None` if the value of
    /// this key must be skipped.
    fn key(
        &mut self,
        event: Event<'a>,
        span: &Span,
        path: &str,
        depth: usize,
    ) -> Result<Option<String>, FatalProblem> {
        let is_plain = matches!(event, Event::Scalar(_, ScalarStyle::Plain, ..));
        let text = match &event {
            Event::Scalar(text, ..) => text.to_string(),
            _ => String::new(),
        };
        let problems = self.problems.len();
        let value = self.node(event, span, path, depth + 1, &mut BTreeMap::new())?;
        if is_plain && text == "<<" {
            self.refuse(span, path, "<<", "merge keys are not supported; write the fields out");
            return Ok(None);
        }
        if self.problems.len() > problems {
            return Ok(Some(text));
        }
        match value {
            Value::String(key) => Ok(Some(key)),
            other => {
                let rule = "a key must be a string; put it in quotes";
                self.refuse(span, path, &shortened(&other), rule);
                Ok(None)
            }
        }
    }
}

fn size(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(size).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(size).sum::<usize>(),
        _ => 1,
    }
}

fn position(marker: &Marker) -> Position {
    Position { line: marker.line().max(1), column: marker.col() + 1 }
}

fn syntax_problem(error: &ScanError) -> Problem {
    let hint = match error.info() {
        // The scanner reports this only within brackets, often several lines after the mistake.
        info if info.contains("placement of ':'") => {
            "; a bracket or a quote above may not be closed"
        }
        // The position may be the start of the value above.
        info if info.contains("tab") => "; indent with spaces instead of tabs",
        _ => "",
    };
    let rule = format!("invalid YAML: {}{hint}", error.info());
    Problem::at(position(error.marker()), "", "", &rule)
}
