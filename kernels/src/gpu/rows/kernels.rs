//! Kernels in CubeCL. A plane is a warp of 32 threads, and `usize` has 32 bits.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

#[cube(launch)]
pub(super) fn softmax_kernel<F: Float>(
    x: &Tensor<F>,
    output: &mut Tensor<F>,
    rows: u32,
    columns: u32,
    queries: u32,
    #[comptime] is_causal: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let start = row as usize * columns as usize;
    let mut visible = columns;
    if is_causal {
        let end = row % queries + 1 + columns;
        visible = max(end, queries) - queries;
    }
    let mut largest = f32::new(-3.4e38);
    let mut column = UNIT_POS_X;
    while column < visible {
        largest = max(largest, f32::cast_from(x[start + column as usize]));
        column += CUBE_DIM_X;
    }
    let largest = plane_max(largest);
    let mut sum = f32::new(0.0);
    let mut column = UNIT_POS_X;
    while column < visible {
        sum += (f32::cast_from(x[start + column as usize]) - largest).exp();
        column += CUBE_DIM_X;
    }
    let sum = plane_sum(sum);
    let mut column = UNIT_POS_X;
    while column < columns {
        let mut value = f32::new(0.0);
        if column < visible {
            value = (f32::cast_from(x[start + column as usize]) - largest).exp() / sum;
        }
        output[start + column as usize] = F::cast_from(value);
        column += CUBE_DIM_X;
    }
}

#[cube(launch)]
pub(super) fn softmax_gradient_kernel<F: Float>(
    y: &Tensor<F>,
    dy: &Tensor<F>,
    output: &mut Tensor<F>,
    rows: u32,
    columns: u32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let start = row as usize * columns as usize;
    let mut sum = f32::new(0.0);
    let mut column = UNIT_POS_X;
    while column < columns {
        let index = start + column as usize;
        sum += f32::cast_from(y[index]) * f32::cast_from(dy[index]);
        column += CUBE_DIM_X;
    }
    let sum = plane_sum(sum);
    let mut column = UNIT_POS_X;
    while column < columns {
        let index = start + column as usize;
        output[index] = F::cast_from(f32::cast_from(y[index]) * (f32::cast_from(dy[index]) - sum));
        column += CUBE_DIM_X;
    }
}

#[cube(launch)]
pub(super) fn layer_norm_kernel<F: Float>(
    x: &Tensor<F>,
    gamma: &Tensor<F>,
    beta: &Tensor<F>,
    output: &mut Tensor<F>,
    moments: &mut Tensor<f32>,
    rows: u32,
    columns: u32,
    epsilon: f32,
    #[comptime] has_beta: bool,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let start = row as usize * columns as usize;
    let num = f32::cast_from(columns);
    let mut sum = f32::new(0.0);
    let mut column = UNIT_POS_X;
    while column < columns {
        sum += f32::cast_from(x[start + column as usize]);
        column += CUBE_DIM_X;
    }
    let mean = plane_sum(sum) / num;
    let mut squares = f32::new(0.0);
    let mut column = UNIT_POS_X;
    while column < columns {
        let centered = f32::cast_from(x[start + column as usize]) - mean;
        squares += centered * centered;
        column += CUBE_DIM_X;
    }
    let reciprocal = f32::new(1.0) / (plane_sum(squares) / num + epsilon).sqrt();
    let mut column = UNIT_POS_X;
    while column < columns {
        let index = column as usize;
        let normalized = (f32::cast_from(x[start + index]) - mean) * reciprocal;
        let mut value = normalized * f32::cast_from(gamma[index]);
        if has_beta {
            value += f32::cast_from(beta[index]);
        }
        output[start + index] = F::cast_from(value);
        column += CUBE_DIM_X;
    }
    if UNIT_POS_X == 0 {
        moments[2 * row as usize] = mean;
        moments[2 * row as usize + 1] = reciprocal;
    }
}

#[cube(launch)]
pub(super) fn layer_norm_gradient_kernel<F: Float>(
    dy: &Tensor<F>,
    x: &Tensor<F>,
    gamma: &Tensor<F>,
    moments: &Tensor<f32>,
    output: &mut Tensor<F>,
    rows: u32,
    columns: u32,
    #[define(F)] _dtype: ElemType,
) {
    let row = CUBE_POS_X * CUBE_DIM_Y + UNIT_POS_Y;
    if row >= rows {
        terminate!();
    }
    let start = row as usize * columns as usize;
    let mean = moments[2 * row as usize];
    let reciprocal = moments[2 * row as usize + 1];
    let mut sum = f32::new(0.0);
    let mut projection = f32::new(0.0);
    let mut column = UNIT_POS_X;
    while column < columns {
        let index = column as usize;
        let scaled = f32::cast_from(dy[start + index]) * f32::cast_from(gamma[index]);
        let normalized = (f32::cast_from(x[start + index]) - mean) * reciprocal;
        sum += scaled;
        projection += scaled * normalized;
        column += CUBE_DIM_X;
    }
    let num = f32::cast_from(columns);
    let sum = plane_sum(sum) / num;
    let projection = plane_sum(projection) / num;
    let mut column = UNIT_POS_X;
    while column < columns {
        let index = column as usize;
        let scaled = f32::cast_from(dy[start + index]) * f32::cast_from(gamma[index]);
        let normalized = (f32::cast_from(x[start + index]) - mean) * reciprocal;
        output[start + index] = F::cast_from((scaled - sum - normalized * projection) * reciprocal);
        column += CUBE_DIM_X;
    }
}

#[cube(launch)]
pub(super) fn partial_sums_kernel<F: Float>(
    y: &Tensor<F>,
    x: &Tensor<F>,
    moments: &Tensor<f32>,
    partial: &mut Tensor<f32>,
    rows: u32,
    columns: u32,
    size: u32,
    #[comptime] has_input: bool,
    #[define(F)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    let chunk = CUBE_POS_Y * CUBE_DIM_Y + UNIT_POS_Y;
    let mut row = chunk * size;
    if column >= columns || row >= rows {
        terminate!();
    }
    let mut sum = f32::new(0.0);
    let mut product = f32::new(0.0);
    let end = min(row + size, rows);
    while row < end {
        let index = row as usize * columns as usize + column as usize;
        let value = f32::cast_from(y[index]);
        sum += value;
        if has_input {
            let mean = moments[2 * row as usize];
            let reciprocal = moments[2 * row as usize + 1];
            product += value * (f32::cast_from(x[index]) - mean) * reciprocal;
        }
        row += 1;
    }
    let start = chunk as usize * 2 * columns as usize;
    partial[start + column as usize] = sum;
    if has_input {
        partial[start + (columns + column) as usize] = product;
    }
}

#[cube(launch)]
pub(super) fn sums_kernel<F: Float>(
    partial: &Tensor<f32>,
    sums: &mut Tensor<F>,
    products: &mut Tensor<F>,
    chunks: u32,
    columns: u32,
    #[comptime] has_input: bool,
    #[define(F)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if column >= columns {
        terminate!();
    }
    let mut sum = f32::new(0.0);
    let mut product = f32::new(0.0);
    let mut chunk = 0_u32;
    while chunk < chunks {
        let start = chunk as usize * 2 * columns as usize;
        sum += partial[start + column as usize];
        if has_input {
            product += partial[start + (columns + column) as usize];
        }
        chunk += 1;
    }
    sums[column as usize] = F::cast_from(sum);
    if has_input {
        products[column as usize] = F::cast_from(product);
    }
}
