//! Reads the rows of a worker's shards and verifies that the input is unchanged.

use std::ops::Range;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use stoker_api::inference::{PlanFile, PlanShard, RowFormat, ShardPlan};
use stoker_storage::hash::sha256_hex;

use super::rows::{Row, lines, records};
use super::source::Source;
#[cfg(feature = "parquet")]
use super::table_reader::TableReader;
use super::{infrastructure, remedy};
use crate::context::Context;
use crate::{InvalidInput, Result};

/// Input of a worker.
pub(super) struct InputReader<'a> {
    context: &'a Context,
    plan: &'a ShardPlan,
    source: Source,
    /// Last input file in a format without byte ranges, by its index in the plan.
    #[cfg(feature = "parquet")]
    table: Option<(u32, TableReader)>,
}

impl<'a> InputReader<'a> {
    pub(super) fn new(context: &'a Context, plan: &'a ShardPlan, source: Source) -> Self {
        Self {
            context,
            plan,
            source,
            #[cfg(feature = "parquet")]
            table: None,
        }
    }

    /// Returns the rows of a shard, in order.
    ///
    /// # Errors
    ///
    /// Fails if the input cannot be read, or has changed since the plan.
    pub(super) fn rows<T: DeserializeOwned>(
        &mut self,
        index: u32,
        planned: &PlanShard,
    ) -> Result<Vec<Row<T>>> {
        let file = &self.plan.files[planned.file as usize];
        let rows = match self.plan.input_format {
            RowFormat::JsonLines => lines(&self.bytes(planned)?, planned.start == 0),
            RowFormat::Csv => records(&self.bytes(planned)?, &file.columns),
            #[cfg(feature = "parquet")]
            format => {
                let table = self.table(planned.file, format)?;
                let rows = table.rows(planned.first_row, planned.rows);
                rows.map_err(|why| InvalidInput(format!("{}: {why}", file.name)))?
            }
            #[cfg(not(feature = "parquet"))]
            other => return Err(super::unsupported_format(other)),
        };
        if rows.len() != planned.rows as usize {
            let (actual, expected) = (rows.len(), planned.rows);
            let why =
                format!("shard {index} of {} has {actual} rows, planned {expected}", file.name);
            return Err(infrastructure(why));
        }
        Ok(rows)
    }

    /// Returns a file of a format without byte ranges. Consecutive shards of a file share it.
    #[cfg(feature = "parquet")]
    fn table(&mut self, file: u32, format: RowFormat) -> Result<&mut TableReader> {
        let (open, table) = match self.table.take() {
            Some(last) if last.0 == file => last,
            _ => {
                let planned = &self.plan.files[file as usize];
                let bytes = self.verified(planned, 0..planned.bytes, &planned.sha256)?;
                let table = TableReader::open(format, bytes, self.plan.shard_rows);
                (file, table.map_err(|why| InvalidInput(format!("{}: {why}", planned.name)))?)
            }
        };
        Ok(&mut self.table.insert((open, table)).1)
    }

    /// Reads the bytes of a shard.
    fn bytes(&self, planned: &PlanShard) -> Result<Bytes> {
        let file = &self.plan.files[planned.file as usize];
        self.verified(file, planned.start..planned.end, &planned.sha256)
    }

    /// Reads bytes of a file and verifies their hash.
    fn verified(&self, file: &PlanFile, range: Range<u64>, sha256: &str) -> Result<Bytes> {
        let Range { start, end } = range;
        let bytes = self.source.read(&file.name, start, end)?;
        if sha256_hex(&bytes) != sha256 {
            let why = format!(
                "input {}: bytes {start} to {end} are not what they were when the job began; {}",
                file.name,
                remedy::of_changed_input(self.context)
            );
            return Err(InvalidInput(why).into());
        }
        Ok(bytes)
    }
}
