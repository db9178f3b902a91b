//! Arrays in memory as data.

use std::collections::BTreeMap;
use std::fmt;

use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Int, Tensor};

use super::{BatchContext, Source};
use crate::Result;

/// Description of one array of [`Rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Path of the array: `data.0` is the first of a tuple, `data.image` the entry with that name.
    pub path: String,
    /// Shape. The first dimension is the number of samples.
    pub dims: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, dims, dtype } = self;
        write!(f, "{path} {dims:?} {dtype:?}")
    }
}

/// Arrays in memory whose first dimension is the sample index: a tensor, or tuples, lists and named
/// maps of tensors.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an array of samples",
    note = "use a burn tensor, or a tuple, `Vec` or `BTreeMap<String, _>` of tensors"
)]
pub trait Rows: Send + Sync {
    /// Same structure as this type, for one batch.
    type Batch;

    /// Whether the structure identifies the inputs. `false` for lists and maps, in which only
    /// position or name could.
    const HAS_INPUTS: bool = true;

    /// Appends a description of every array, with paths that start with `path`.
    fn fields(&self, path: &str, out: &mut Vec<Field>);

    /// Returns the given rows on `device`. Floating-point arrays are cast to `dtype`, if given. In
    /// a tuple, this applies only to the first element, the inputs.
    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch;
}

impl<const D: usize, K: Basic> Rows for Tensor<D, K>
where
    Self: Send + Sync,
{
    type Batch = Self;

    fn fields(&self, path: &str, out: &mut Vec<Field>) {
        let (path, dims) = (path.into(), self.dims().to_vec());
        out.push(Field { path, dims, dtype: self.dtype() });
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self {
        let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
        let rows = Tensor::<1, Int>::from_data(rows.as_slice(), &self.device());
        let rows = self.clone().select(0, rows);
        match dtype.filter(|dtype| rows.dtype().is_float() && rows.dtype() != *dtype) {
            // Cast on the host: arrays are usually there, and half the bytes go to the device.
            Some(dtype) => Self::from_data(rows.into_data(), (device, dtype)),
            None => rows.to_device(device),
        }
    }
}

macro_rules! tuple_rows {
    ($($field:ident $index:tt),*) => {
        impl<$($field: Rows),*> Rows for ($($field,)*) {
            type Batch = ($($field::Batch,)*);

            fn fields(&self, path: &str, out: &mut Vec<Field>) {
                $(self.$index.fields(&format!("{path}.{}", $index), out);)*
            }

            fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
                ($(self.$index.rows(rows, device, dtype.filter(|_| $index == 0)),)*)
            }
        }
    };
}
tuple_rows!(A 0, B 1);
tuple_rows!(A 0, B 1, C 2);
tuple_rows!(A 0, B 1, C 2, D 3);

impl<R: Rows> Rows for Vec<R> {
    type Batch = Vec<R::Batch>;

    const HAS_INPUTS: bool = false;

    fn fields(&self, path: &str, out: &mut Vec<Field>) {
        for (index, field) in self.iter().enumerate() {
            field.fields(&format!("{path}.{index}"), out);
        }
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
        self.iter().map(|field| field.rows(rows, device, dtype)).collect()
    }
}

impl<R: Rows> Rows for BTreeMap<String, R> {
    type Batch = BTreeMap<String, R::Batch>;

    const HAS_INPUTS: bool = false;

    fn fields(&self, path: &str, out: &mut Vec<Field>) {
        for (name, field) in self {
            field.fields(&format!("{path}.{name}"), out);
        }
    }

    fn rows(&self, rows: &[usize], device: &Device, dtype: Option<DType>) -> Self::Batch {
        let batch = |(name, field): (&String, &R)| (name.clone(), field.rows(rows, device, dtype));
        self.iter().map(batch).collect()
    }
}

/// Arrays with the same number of samples.
pub(super) struct Arrays<R> {
    rows: R,
    fields: Vec<Field>,
    samples: usize,
}

impl<R: Rows> Arrays<R> {
    pub(super) fn new(rows: R) -> Result<Self> {
        let mut fields = vec![];
        rows.fields("data", &mut fields);
        let Field { path: first, dims, .. } = fields.first().ok_or("the data has no fields")?;
        let samples = dims[0];
        if samples == 0 {
            return Err(format!("{first} has no samples").into());
        }
        if let Some(Field { path, dims, .. }) = fields.iter().find(|field| field.dims[0] != samples)
        {
            let other = dims[0];
            return Err(format!("{path} has {other} samples, but {first} has {samples}").into());
        }
        Ok(Self { rows, fields, samples })
    }
}

impl<R: Rows> Source<R::Batch> for Arrays<R> {
    fn samples(&self) -> usize {
        self.samples
    }

    fn fields(&self) -> Vec<String> {
        self.fields.iter().map(ToString::to_string).collect()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<R::Batch> {
        // Keep double-precision arrays unless another precision is requested.
        let dtype = Some(context.dtype).filter(|dtype| R::HAS_INPUTS && *dtype != DType::F32);
        Ok(self.rows.rows(samples, context.device, dtype))
    }
}
