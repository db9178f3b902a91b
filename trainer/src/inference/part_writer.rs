//! Serialization of outputs to parts.

use serde::Serialize;
use stoker_api::inference::{InferenceOutput, RowFormat};

use crate::{InvalidInput, Result};

/// Output of one shard, row by row.
pub(super) enum PartWriter {
    Lines(Vec<u8>),
    /// CSV writer, and whether the first row, which writes the header, was checked.
    Csv(Box<csv::Writer<Vec<u8>>>, bool),
    #[cfg(feature = "parquet")]
    Table(super::table::Table),
}

impl PartWriter {
    /// Creates an empty part.
    ///
    /// # Errors
    ///
    /// Fails if this program does not support the format.
    pub(super) fn new(output: &InferenceOutput) -> Result<Self> {
        if cfg!(feature = "parquet") && output.format.is_typed() && output.columns.is_empty() {
            let why = "output.columns is empty; the format requires names and types of all columns";
            return Err(InvalidInput(why.into()).into());
        }
        match output.format {
            RowFormat::JsonLines => Ok(Self::Lines(vec![])),
            RowFormat::Csv => Ok(Self::Csv(Box::new(csv::Writer::from_writer(vec![])), false)),
            #[cfg(feature = "parquet")]
            typed => Ok(Self::Table(super::table::Table::new(typed, &output.columns))),
            #[cfg(not(feature = "parquet"))]
            typed => Err(super::unsupported_format(typed)),
        }
    }

    /// Appends a row.
    ///
    /// # Errors
    ///
    /// Fails if the format cannot represent the row.
    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<()> {
        match self {
            Self::Lines(bytes) => {
                serde_json::to_writer(&mut *bytes, row).map_err(|error| refused("JSON", &error))?;
                bytes.push(b'\n');
            }
            Self::Csv(writer, has_header) => {
                if !std::mem::replace(has_header, true) {
                    require_named_fields(row)?;
                }
                writer.serialize(row).map_err(|error| refused("CSV", &error))?;
            }
            #[cfg(feature = "parquet")]
            Self::Table(table) => table.push(row)?,
        }
        Ok(())
    }

    /// Returns the bytes of the part.
    ///
    /// # Errors
    ///
    /// Same as [`push`](Self::push).
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        match self {
            Self::Lines(bytes) => Ok(bytes),
            Self::Csv(writer, _) => {
                Ok((*writer).into_inner().map_err(|error| error.into_error())?)
            }
            #[cfg(feature = "parquet")]
            Self::Table(table) => table.finish(),
        }
    }
}

/// Fails unless the output has named fields, which become the CSV header.
fn require_named_fields(row: &impl Serialize) -> Result<()> {
    match serde_json::to_value(row)? {
        serde_json::Value::Object(_) => Ok(()),
        row => {
            let why = format!(
                "the program's output is {row}, but a row of CSV must be a struct, whose fields \
                 name the columns; return a struct or use another output.format"
            );
            Err(InvalidInput(why).into())
        }
    }
}

fn refused(format: &str, error: &dyn std::fmt::Display) -> InvalidInput {
    InvalidInput(format!(
        "cannot represent the program's output as {format}: {error}; use another output.format"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    struct Item<'a> {
        name: &'a str,
        size: Option<f64>,
    }

    const ITEMS: [Item<'_>; 3] = [
        Item { name: "a", size: Some(0.1) },
        Item { name: "b, \"c\"\nd", size: None },
        Item { name: "日本", size: Some(f64::NAN) },
    ];

    fn check(format: RowFormat, num: usize, expected: &str) {
        let output = InferenceOutput { format, ..InferenceOutput::default() };
        let mut part = PartWriter::new(&output).unwrap();
        ITEMS.iter().take(num).for_each(|item| part.push(item).unwrap());
        assert_eq!(String::from_utf8(part.finish().unwrap()).unwrap(), expected);
    }

    #[test]
    fn rows_are_written_in_the_requested_format() {
        check(RowFormat::JsonLines, 0, "");
        let lines = "{\"name\":\"a\",\"size\":0.1}\n{\"name\":\"b, \\\"c\\\"\\nd\",\"size\":null}\n\
                     {\"name\":\"日本\",\"size\":null}\n";
        check(RowFormat::JsonLines, 3, lines);
        check(RowFormat::Csv, 0, "");
        check(RowFormat::Csv, 3, "name,size\na,0.1\n\"b, \"\"c\"\"\nd\",\n日本,NaN\n");
    }

    #[test]
    fn unsupported_outputs_are_refused_with_a_remedy() {
        let output = InferenceOutput { format: RowFormat::Csv, ..InferenceOutput::default() };
        let error = PartWriter::new(&output).unwrap().push(&json!({"a": {"b": 1}})).unwrap_err();
        assert!(error.to_string().contains("use another output.format"), "{error}");
        for (row, shown) in [(json!([1, "a"]), "[1,\"a\"]"), (json!(0.5), "0.5")] {
            let error = PartWriter::new(&output).unwrap().push(&row).unwrap_err().to_string();
            assert!(error.contains(&format!("output is {shown}, but a row of CSV")), "{error}");
        }
    }
}
