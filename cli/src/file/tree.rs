//! YAML as a JSON value, with the place of every field. One document, string keys, no key twice.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};
use serde_saphyr::granit_parser::{Event, Marker, Options, Parser, ScalarStyle, ScanError, Span};
use stoker_api::validate::{item, member, shortened};

use super::Problem;
use super::scalar::{Scalar, resolve};

/// Values in a document, those that aliases repeat included: bounds what a few aliases can blow up.
const NODES_MAX: usize = 100_000;
/// Levels of nesting: bounds the stack.
const DEPTH_MAX: usize = 64;

/// Where something is in a file, both from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A document.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    /// What it says.
    pub(super) value: Value,
    /// Where each field is, by its path; `None` where it came from `--set`.
    pub(super) places: BTreeMap<String, Option<Place>>,
}

impl Tree {
    /// Where the field at `path` is, or else the innermost one around it.
    pub(super) fn place(&self, path: &str) -> Option<Place> {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return *place;
            }
            let end = path.rfind(['.', '[']).unwrap_or(0);
            if path.is_empty() {
                return None;
            }
            path = &path[..end];
        }
    }

    /// Takes over the places of everything at and below `from`, for `to`.
    pub(super) fn adopt(&mut self, source: &Self, from: &str, to: &str) {
        for (path, place) in source.places.range(from.to_owned()..) {
            let Some(rest) = path.strip_prefix(from) else { break };
            if rest.is_empty() || rest.starts_with(['.', '[']) {
                self.places.insert(format!("{to}{rest}"), *place);
            }
        }
    }
}

/// Reads one document. What it says is of use even where there are problems, if there is a tree at
/// all.
pub(super) fn read(text: &str) -> (Option<Tree>, Vec<Problem>) {
    let mut options = Options::default();
    // Whether comments come as events depends on what else is linked.
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
    /// What an alias stands for.
    anchors: HashMap<usize, Value>,
    problems: Vec<Problem>,
    num_nodes: usize,
}

/// A problem after which nothing more can be read.
type Stop = Box<Problem>;

impl<'a> Reader<'a> {
    fn document(&mut self) -> Result<Option<Tree>, Stop> {
        let mut tree = None;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => {
                    if tree.is_none() && self.problems.is_empty() {
                        let rule = "the file is empty: an Experiment is expected";
                        self.problems.push(Problem::at(place(&span.start), "", "", rule));
                    }
                    return Ok(tree);
                }
                Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
                _ if tree.is_some() => {
                    let rule = "a second document: one file holds one experiment";
                    self.problems.push(Problem::at(place(&span.start), "", "", rule));
                    return Ok(tree);
                }
                event => {
                    let mut places = BTreeMap::new();
                    places.insert(String::new(), Some(place(&span.start)));
                    let value = self.node(event, &span, "", 0, &mut places)?;
                    tree = Some(Tree { value, places });
                }
            }
        }
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), Stop> {
        match self.parser.next_event() {
            None => Ok((Event::StreamEnd, Span::default())),
            Some(Ok(next)) => Ok(next),
            Some(Err(error)) => Err(Box::new(syntax(&error))),
        }
    }

    fn refuse(&mut self, span: &Span, path: &str, value: &str, rule: &str) {
        self.problems.push(Problem::at(place(&span.start), path, value, rule));
    }

    fn node(
        &mut self,
        event: Event<'a>,
        span: &Span,
        path: &str,
        depth: usize,
        places: &mut BTreeMap<String, Option<Place>>,
    ) -> Result<Value, Stop> {
        self.count(span, 1)?;
        if depth > DEPTH_MAX {
            let rule = format!("nested deeper than {DEPTH_MAX} levels");
            return Err(Box::new(Problem::at(place(&span.start), path, "", &rule)));
        }
        let (value, anchor) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let kind = tag.as_ref().map(|tag| tag.core_suffix());
                let is_string = style != ScalarStyle::Plain || kind == Some(Some("str"));
                match kind {
                    None | Some(Some("str")) => {}
                    // kubectl reads `!!int "3"` as a number.
                    Some(Some(_)) => {
                        self.refuse(span, path, &text, "only the tag !!str is read: drop the tag");
                    }
                    Some(None) => {
                        let rule = "tags other than YAML's own have no meaning here";
                        self.refuse(span, path, &text, rule);
                    }
                }
                (self.scalar(&text, is_string, span, path), anchor)
            }
            Event::SequenceStart(_, anchor, _) => {
                (Value::Array(self.list(path, depth, places)?), anchor)
            }
            Event::MappingStart(_, anchor, _) => {
                (Value::Object(self.map(path, depth, places)?), anchor)
            }
            Event::Alias(id) => {
                let Some(value) = self.anchors.get(&id).cloned() else {
                    self.refuse(span, path, "", "an alias to something that contains it");
                    return Ok(Value::Null);
                };
                self.count(span, size(&value))?;
                (value, 0)
            }
            _ => {
                return Err(Box::new(Problem::at(
                    place(&span.start),
                    path,
                    "",
                    "a value is expected",
                )));
            }
        };
        if anchor != 0 {
            self.anchors.insert(anchor, value.clone());
        }
        Ok(value)
    }

    fn count(&mut self, span: &Span, nodes: usize) -> Result<(), Stop> {
        self.num_nodes += nodes;
        if self.num_nodes <= NODES_MAX {
            return Ok(());
        }
        let rule = format!("more than {NODES_MAX} values");
        Err(Box::new(Problem::at(place(&span.start), "", "", &rule)))
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
        places: &mut BTreeMap<String, Option<Place>>,
    ) -> Result<Vec<Value>, Stop> {
        let mut values = Vec::new();
        loop {
            let (event, span) = self.next()?;
            if event == Event::SequenceEnd {
                return Ok(values);
            }
            let path = item(path, values.len());
            places.insert(path.clone(), Some(place(&span.start)));
            values.push(self.node(event, &span, &path, depth + 1, places)?);
        }
    }

    fn map(
        &mut self,
        path: &str,
        depth: usize,
        places: &mut BTreeMap<String, Option<Place>>,
    ) -> Result<Map<String, Value>, Stop> {
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
                let first = places.get(&path).copied().flatten();
                let line = first.map_or(0, |place| place.line);
                let rule = format!("the same key twice, first in line {line}: keep one");
                let value = self.node(event, &span, &path, depth + 1, &mut BTreeMap::new())?;
                self.refuse(&key_span, &path, &shortened(&value), &rule);
                continue;
            }
            places.insert(path.clone(), Some(place(&key_span.start)));
            let value = self.node(event, &span, &path, depth + 1, places)?;
            members.insert(key, value);
        }
    }

    /// A key, if it is a string; what else it is has been refused.
    fn key(
        &mut self,
        event: Event<'a>,
        span: &Span,
        path: &str,
        depth: usize,
    ) -> Result<Option<String>, Stop> {
        let is_plain = matches!(event, Event::Scalar(_, ScalarStyle::Plain, ..));
        let text = match &event {
            Event::Scalar(text, ..) => text.to_string(),
            _ => String::new(),
        };
        let problems = self.problems.len();
        let value = self.node(event, span, path, depth + 1, &mut BTreeMap::new())?;
        if is_plain && text == "<<" {
            self.refuse(span, path, "<<", "merge keys are not read: write the fields out");
            return Ok(None);
        }
        if self.problems.len() > problems {
            return Ok(Some(text));
        }
        match value {
            Value::String(key) => Ok(Some(key)),
            other => {
                let rule = "a key must be a string: put it in quotes";
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

fn place(marker: &Marker) -> Place {
    Place { line: marker.line().max(1), column: marker.col() + 1 }
}

fn syntax(error: &ScanError) -> Problem {
    let rule = format!("not YAML: {}", error.info());
    Problem::at(place(error.marker()), "", "", &rule)
}
