//! The only module that opens standard output and standard error.

pub(crate) mod background;

use std::io::{Error, ErrorKind, IsTerminal as _, Write};
use std::sync::OnceLock;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde_json::Value;

use crate::failure::Failure;

/// Output format of all commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Human-readable text.
    Text,
    /// JSON: one value, or one value per line.
    Json,
}

/// Value of `--output`. Each command accepts some of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Human-readable text
    #[default]
    Text,
    /// Text with all columns
    #[value(skip)]
    Wide,
    /// JSON: one value, or one value per line
    Json,
    /// The value of `json` as YAML
    #[value(skip)]
    Yaml,
    /// Only the names, one per line
    #[value(skip)]
    Name,
    /// CSV: a header, and one line per value
    Csv,
    /// Parquet: a binary file with one row per value
    Parquet,
}

impl Format {
    /// Returns the parser for commands without other formats. clap requires one type for all
    /// arguments with the name of a global one.
    pub(crate) fn text_or_json() -> impl TypedValueParser<Value = Self> {
        Self::parser(&[Self::Text, Self::Json])
    }

    /// Returns the parser for commands that show objects.
    pub(crate) fn of_objects() -> impl TypedValueParser<Value = Self> {
        Self::parser(&[Self::Text, Self::Json, Self::Yaml])
    }

    /// Returns the parser for commands that list objects.
    pub(crate) fn of_lists() -> impl TypedValueParser<Value = Self> {
        Self::parser(&[Self::Text, Self::Wide, Self::Json, Self::Yaml, Self::Name])
    }

    fn parser(formats: &[Self]) -> impl TypedValueParser<Value = Self> + use<> {
        let formats = formats.to_vec();
        let possible = formats.iter().map(|format| {
            let (name, help) = format.name_and_help();
            PossibleValue::new(name).help(help)
        });
        PossibleValuesParser::new(possible.collect::<Vec<_>>()).try_map(move |text| {
            let found = formats.iter().find(|format| format.name_and_help().0 == text);
            found.copied().ok_or("unknown format")
        })
    }

    fn name_and_help(self) -> (&'static str, &'static str) {
        match self {
            Self::Text => ("text", "Human-readable text"),
            Self::Wide => ("wide", "Text with all columns"),
            Self::Json => ("json", "JSON: one value, or one value per line"),
            Self::Yaml => ("yaml", "The value of json as YAML"),
            Self::Name => ("name", "Only the names, one per line"),
            Self::Csv => ("csv", "CSV: a header, and one line per value"),
            Self::Parquet => ("parquet", "Parquet: a binary file with one row per value"),
        }
    }
}

impl From<Format> for Output {
    fn from(format: Format) -> Self {
        match format {
            // Commands that accept other formats read their own argument.
            Format::Text
            | Format::Wide
            | Format::Yaml
            | Format::Name
            | Format::Csv
            | Format::Parquet => Self::Text,
            Format::Json => Self::Json,
        }
    }
}

/// First error of standard output, except that the reader has closed the pipe.
static OUTPUT_ERROR: OnceLock<Error> = OnceLock::new();

/// Prints a line to standard output. The program continues if this fails; see [`output_error`].
pub(crate) fn out(line: impl std::fmt::Display) {
    let line = line.to_string();
    background::run(move || note_error(writeln!(std::io::stdout().lock(), "{line}")));
}

/// Prints a line of a command that only shows things. If the reader has closed the pipe, nothing is
/// left to do, so the program ends.
pub(crate) fn show(line: impl std::fmt::Display) {
    let written = writeln!(std::io::stdout().lock(), "{line}");
    if written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe) {
        std::process::exit(0);
    }
    note_error(written);
}

fn note_error(written: std::io::Result<()>) {
    if let Some(error) = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe) {
        let _ = OUTPUT_ERROR.set(error);
    }
}

/// Returns the failure of a command that could not write everything to standard output. A reader
/// that closes a pipe is no failure.
pub(crate) fn output_error() -> Option<Failure> {
    background::drain();
    note_error(std::io::stdout().flush());
    let error = OUTPUT_ERROR.get()?;
    Some(Failure::System(format!(
        "cannot write to standard output: {error}; what was written is incomplete"
    )))
}

/// Prints a line to standard error.
pub(crate) fn err(line: impl std::fmt::Display) {
    let line = line.to_string();
    background::run(move || {
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    });
}

/// Writes bytes unchanged to standard output.
pub(crate) fn raw(bytes: &[u8]) {
    note_error(std::io::stdout().lock().write_all(bytes));
}

/// Returns standard output for binary data, or `None` if it is a terminal.
pub(crate) fn binary() -> Option<impl Write + Send> {
    let output = std::io::stdout();
    (!output.is_terminal()).then_some(output)
}

/// Prints a line to standard output. Returns `false` if the reader has closed the pipe.
pub(crate) fn try_out(line: impl std::fmt::Display) -> bool {
    writeln!(std::io::stdout().lock(), "{line}").is_ok()
}

/// Prints an object as YAML, or else as JSON.
pub(crate) fn object(value: &Value, format: Format) -> Result<(), Failure> {
    match format {
        Format::Yaml => out(yaml(value)?),
        _ => out(value),
    }
    Ok(())
}

/// Formats a value as YAML, without a newline at its end.
pub(crate) fn yaml(value: &Value) -> Result<String, Failure> {
    let text = serde_saphyr::to_string(value)
        .map_err(|error| Failure::System(format!("cannot write YAML: {error}")))?;
    Ok(text.trim_end().to_owned())
}

/// Formats `rows` under `header` with left-aligned columns, two spaces apart.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
    let mut widths = Vec::new();
    widen(&mut widths, std::iter::once(&header).chain(rows));
    let lines = std::iter::once(&header).chain(rows).map(|row| padded(row, &widths));
    lines.collect::<Vec<_>>().join("\n")
}

/// Widens columns to the width of their cells, in characters.
pub(crate) fn widen<'a>(widths: &mut Vec<usize>, rows: impl Iterator<Item = &'a Vec<String>>) {
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
}

/// Formats one row of a table, without trailing spaces.
pub(crate) fn padded(row: &[String], widths: &[usize]) -> String {
    let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
    cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned_without_trailing_spaces() {
        let rows =
            [vec!["0".to_owned(), "Completed".to_owned()], vec!["10".to_owned(), String::new()]];
        assert_eq!(table(&["TRIAL", "PHASE"], &rows), "TRIAL  PHASE\n0      Completed\n10");
    }
}
