//! Errors of a file, with their positions.

use std::fmt;
use std::path::PathBuf;

use serde::{Serialize, Serializer};
use stoker_api::validate::FieldError;

use super::tree::{Position, Tree};

/// One error of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    /// Line, from 1; `None` for a field from `--set` or an unreadable file.
    pub(crate) line: Option<usize>,
    /// Column in characters, from 1.
    pub(crate) column: Option<usize>,
    /// Path of the field; empty for the whole file.
    pub(crate) field: String,
    /// Offending value; empty if the field is absent.
    pub(crate) value: String,
    /// Violated rule.
    pub(crate) rule: String,
}

/// All errors of a file. Serialized as a list of problems.
#[derive(Clone, Debug)]
pub(crate) struct FileError {
    /// Path of the file.
    pub(crate) path: PathBuf,
    /// At least one problem, sorted by line and column.
    pub(crate) problems: Vec<Problem>,
}

impl Problem {
    /// Returns an error at a position of the file.
    pub(super) fn at(position: Position, field: &str, value: &str, rule: &str) -> Self {
        let (line, column) = (Some(position.line), Some(position.column));
        Self { line, column, ..Self::without_position(field, value, rule) }
    }

    /// Returns an error of a field without a position, such as a field from `--set`.
    pub(super) fn without_position(field: &str, value: &str, rule: &str) -> Self {
        let (field, value, rule) = (field.to_owned(), value.to_owned(), rule.to_owned());
        Self { line: None, column: None, field, value, rule }
    }

    /// Returns `true` for an invalid `--set`, whose text is the value.
    fn is_of_flag(&self) -> bool {
        self.line.is_none() && self.field == "--set"
    }

    /// Returns an error of a field, at the position of the field if the file has it.
    pub(super) fn of(error: &FieldError, tree: &Tree) -> Self {
        let field = tree.original(&error.path);
        match tree.position(&error.path) {
            Some(position) => Self::at(position, field, &error.value, &error.rule),
            None => Self::without_position(field, &error.value, &error.rule),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_of_flag() {
            return write!(f, "--set {}: {}", self.value, self.rule);
        }
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, "{line}:{column}: ")?;
        } else if !self.field.is_empty() {
            write!(f, "(--set): ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.rule)?;
        if self.value.is_empty() { Ok(()) } else { write!(f, " (found {})", self.value) }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            if problem.is_of_flag() {
                write!(f, "{newline}{problem}")?;
                continue;
            }
            let separator = if problem.line.is_some() { ":" } else { ": " };
            write!(f, "{newline}{}{separator}{problem}", self.path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for FileError {}

impl Serialize for FileError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.problems.serialize(serializer)
    }
}
